"""Every small world: all programs of a few letters on two and three ranks, and what became of them.

``programs`` has the letters and joinables, ``scheduler`` decides which rank runs next, ``transports`` carries messages,
``verdicts`` runs all programs and keeps how they end, and ``reached`` finds states and messages that no letter reaches.
``python -m tests.worlds --help`` says how to run all of them.
"""

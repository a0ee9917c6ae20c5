"""How the ranks of one group keep in step: ``channel`` has what is the same in all modes, and one of them at a time.

``announced``: each burst is announced by a header. ``lockstep``: all ranks run the same steps (``Join.iterate``). What
they answer is in ``mode``.
"""

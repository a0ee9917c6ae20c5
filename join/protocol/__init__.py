"""How the ranks of one group keep in step: one file for each mode, and what they share.

``announced``: each burst is announced by a header. ``declared``: ranks know each other's numbers of steps.
``lockstep``: all ranks run the same steps (``Join.iterate``).
"""

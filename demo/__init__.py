"""The demo, ``python -m demo``: handwritten digits on four uneven ranks, compared with one process and torch's Join."""

"""The demo, ``python -m demo``: handwritten digits on four very uneven ranks, beside one process and torch's Join."""

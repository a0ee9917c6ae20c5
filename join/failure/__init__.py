"""Failure of a rank: how the rank shows it, and how the others find the rank that failed first (``join.failure.peers``)."""

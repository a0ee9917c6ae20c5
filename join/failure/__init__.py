"""Failure of a rank: how it is announced, and how the others find the first cause (``join.failure.guard``)."""

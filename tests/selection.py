"""Which cases are run: all of a cross product, or some in which each pair of its parts occurs.

``make test`` runs some, ``make test-all`` sets ``TESTS=all``; only there are tests that :data:`at_night` marks. Some
tests that train for three epochs train for two in ``make test``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import combinations
from typing import TypeVar

import pytest

ALL = os.environ.get("TESTS") == "all"
at_night = pytest.mark.skipif(not ALL, reason="costly, and tells little more than others: make test-all")
T = TypeVar("T")
Parts = Mapping[str, Hashable]
Epochs = tuple[tuple[int, ...], ...]


def by_position(row: Iterable[Hashable]) -> Parts:
    """The parts of a row that is a tuple of them."""
    return {str(at): part for at, part in enumerate(row)}


def all_or_some(rows: Iterable[T], parts_of: Callable[[T], Parts], together: int = 2) -> list[T]:
    """All rows, or so few of them that each pair of parts which occurs in a row still occurs in one.

    Args:
        rows: what there is.
        parts_of: what a row is made of, by name.
        together: 2 for each pair; 1 for each part.
    """
    every = list(rows)
    if ALL:
        return every
    pairs = [set(combinations(sorted(parts_of(row).items(), key=lambda part: part[0]), together)) for row in every]
    missing = set[tuple[tuple[str, Hashable], ...]]().union(*pairs)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(every)), key=lambda at: len(pairs[at] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return [row for at, row in enumerate(every) if at in chosen]


def first_and_last(epochs: Epochs) -> Epochs:
    """All epochs, or those two: state goes from one to the next, and another rank has no data."""
    return epochs if ALL or len(epochs) < 3 else (epochs[0], epochs[-1])

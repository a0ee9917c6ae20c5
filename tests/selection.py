"""Which tests run: ``make test`` runs some, ``make test-all`` (in CI) more, ``make test-night`` all.

The environment variable ``TESTS`` says so: unset, "all" or "night". Tests that :data:`in_test_all` or :data:`at_night`
marks are collected there only, unless they are named one by one (``pytest FILE::TEST``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import combinations
from typing import TypeVar

import pytest

NIGHT = os.environ.get("TESTS") == "night"
ALL = NIGHT or os.environ.get("TESTS") in ("all", "gpu")
in_test_all, at_night = pytest.mark.in_test_all, pytest.mark.at_night
T = TypeVar("T")
Parts = Mapping[str, Hashable]
Epochs = tuple[tuple[int, ...], ...]


def by_position(row: Iterable[Hashable]) -> Parts:
    """The parts of a row that is a tuple of them."""
    return {str(at): part for at, part in enumerate(row)}


def all_or_some(rows: Iterable[T], parts_of: Callable[[T], Parts], together: int = 2) -> list[T]:
    """All rows at night; else so few of them that each pair of parts which occurs in a row still occurs in one.

    ``make test`` has each part occur.

    Args:
        rows: what there is.
        parts_of: what a row is made of, by name.
        together: 2 for each pair; 1 for each part in ``make test-all``, too.
    """
    every = list(rows)
    if NIGHT:
        return every
    together = together if ALL else 1
    pairs = [set(combinations(sorted(parts_of(row).items(), key=lambda part: part[0]), together)) for row in every]
    missing = set[tuple[tuple[str, Hashable], ...]]().union(*pairs)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(every)), key=lambda at: len(pairs[at] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return [row for at, row in enumerate(every) if at in chosen]


def first_and_last(epochs: Epochs) -> Epochs:
    """All epochs at night, or those two: state goes from one to the next, and another rank has no data."""
    return epochs if NIGHT or len(epochs) < 3 else (epochs[0], epochs[-1])

"""Which tests run: ``make test`` runs some, ``make test-all`` (in CI) more, ``make test-night`` all.

The environment variable ``TESTS`` says so: unset, "all" or "night". Tests that :data:`in_test_all` or :data:`at_night`
marks are collected there only, unless they are named one by one (``pytest FILE::TEST``).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import combinations
from typing import Any, TypeVar, cast

import pytest

NIGHT = os.environ.get("TESTS") == "night"
ALL = NIGHT or os.environ.get("TESTS") in ("all", "gpu")
in_test_all, at_night = pytest.mark.in_test_all, pytest.mark.at_night
in_quiet = pytest.mark.in_quiet
"""Of tests that :func:`assert_soon`: ``make test-quiet`` runs them one by one, with ``QUIET=1``."""
T = TypeVar("T")
Parts = Mapping[str, Hashable]
Epochs = tuple[tuple[int, ...], ...]


def assert_soon(seconds: float, most: float, told: str = "") -> None:
    """Something took less than so many seconds; only where nothing else runs, and so not beside other tests."""
    assert seconds < most or not os.environ.get("QUIET"), told


def parts_in(row: Any) -> Parts:
    """The parts of a row: those of a tuple, or the attributes of an object, in which other such objects may be."""
    if isinstance(row, tuple):
        return {str(at): str(part) for at, part in enumerate(cast("tuple[Any, ...]", row))}
    return {
        f"{name}.{inner}": part
        for name, value in vars(row).items()
        for inner, part in (parts_in(value) if dataclasses.is_dataclass(value) else {"": str(value)}).items()
    }


def all_or_some(rows: Iterable[T], parts_of: Callable[[T], Parts] = parts_in, together: int = 2) -> list[T]:
    """All rows at night; else so few of them that each pair of parts which occurs in a row still occurs in one.

    ``make test`` has each part occur.

    Args:
        rows: what there is.
        parts_of: what a row is made of, by name.
        together: 2 for each pair; 1 for each part in ``make test-all``, too.
    """
    return list(rows) if NIGHT else _covering(rows, parts_of, together if ALL else 1)


def all_or_each(rows: Iterable[T], parts_of: Callable[[T], Parts] = parts_in) -> list[T]:
    """All rows in ``make test-all``; in ``make test`` so few of them that each part still occurs in one."""
    return list(rows) if ALL else _covering(rows, parts_of, 1)


def _covering(rows: Iterable[T], parts_of: Callable[[T], Parts], together: int) -> list[T]:
    every = list(rows)
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

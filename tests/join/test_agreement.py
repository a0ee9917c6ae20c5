"""Which values count as equal on all ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest

from join.agreement import differences


def compared(*values: Any) -> str:
    """The text for values of one name on as many ranks; ``...`` where a rank has none."""
    return differences({rank: [("it", {} if value is ... else {"x": value})] for rank, value in enumerate(values)})


@pytest.mark.parametrize("values", [(1.0, 1.0 + 1e-9), (math.nan, math.nan), ("a", "a"), (1, 2, ...), (..., 1, 1)])
def test_values_that_count_as_equal(values: tuple[Any, ...]) -> None:
    assert compared(*values) == ""


@pytest.mark.parametrize("values", [(1.0, 1.0001), (math.nan, 1.0), ("a", "b"), (1, 2)])
def test_values_that_differ(values: tuple[Any, ...]) -> None:
    assert compared(*values) == f"the x of it is {values[0]!r} on rank 0, {values[1]!r} on rank 1"


def test_a_long_list_is_cut() -> None:
    ranks = {rank: [("it", dict.fromkeys("abcdefg", rank))] for rank in range(2)}
    assert differences(ranks).endswith("the e of it is 0 on rank 0, 1 on rank 1; and 2 more")

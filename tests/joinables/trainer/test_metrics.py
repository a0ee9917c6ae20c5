"""Metrics do not depend on who logged what, in which order."""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from join.collectives import Collective, SingleCollective, run_threads
from joinables.trainer.metrics import MetricStore, Reduction, exact_sum

FLOATS = st.floats(-1e30, 1e30, allow_nan=False)


@given(st.lists(FLOATS), st.randoms())
def test_sums_are_exact(values: list[float], random: object) -> None:
    total: list[float] = []
    for value in values:
        total = exact_sum([*total, value])
    assert sum(map(Fraction, total)) == sum(map(Fraction, values))
    assert len(total) <= 41  # as many bits as doubles range over, by the 53 of each


def test_values_that_are_no_numbers() -> None:
    for values, expected in (
        ((1.0, math.inf), "inf"),
        ((math.inf, 1.0), "inf"),
        ((math.nan, 1.0), "nan"),
        ((math.inf, -math.inf), "nan"),
        ((1e308, 1e308), "nan"),
    ):
        total = exact_sum([*exact_sum(values[:1]), values[1]])
        assert str(math.fsum(total)) == expected


@given(st.lists(st.tuples(FLOATS, st.integers(1, 64)), min_size=1, max_size=12), st.integers(1, 4))
def test_the_same_over_any_number_of_ranks(values: list[tuple[float, int]], ranks: int) -> None:
    def reduce(rank: int, world_size: int, collective: object) -> dict[str, float]:
        store = MetricStore()
        for value, weight in values[rank::world_size]:
            for kind in ("mean", "sum", "min", "max"):
                store.record(kind, value, weight, kind)  # type: ignore[arg-type]
        return store.reduce(collective)  # type: ignore[arg-type]

    single = SingleCollective()
    expected = reduce(0, 1, single)
    assert expected["min"] == min(value for value, _ in values)
    for found in run_threads(ranks, lambda collective: reduce(collective.rank, ranks, collective)):
        assert found == expected


@pytest.mark.parametrize("other", [1.0, math.inf, -math.inf])
def test_nan_wins_in_any_order(other: float) -> None:
    def reduce(collective: Collective, values: tuple[float, float]) -> dict[str, float]:
        store = MetricStore()
        for value in values[collective.rank :: collective.world_size]:
            for kind in get_args(Reduction):
                store.record(kind, value, 1, kind)
        return store.reduce(collective)

    for ranks in (1, 2):
        for values in ((math.nan, other), (other, math.nan)):
            for found in run_threads(ranks, functools.partial(reduce, values=values)):
                assert len(found) == 4
                assert all(map(math.isnan, found.values()))


def test_state_goes_on() -> None:
    store = MetricStore()
    store.record("loss", torch.tensor(2.0), 3)
    other = MetricStore()
    other.merge(store.state_dict())
    other.record("loss", 4.0, 1)
    single = SingleCollective()
    assert other.reduce(single)["loss"] == 2.5


def test_bad_values() -> None:
    store = MetricStore()
    for value in (torch.zeros(2), torch.zeros(2).numpy(), MetricStore()):
        with pytest.raises(TypeError, match=r"Metric 'x' was logged as an object of type .*, which is not one number"):
            store.record("x", value, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reduce_fx='median'"):
        store.record("y", 1.0, 1, "median")  # type: ignore[arg-type]
    store.record("x", 1.0, 1)
    with pytest.raises(ValueError, match=r"Metric 'x' was logged with reduce_fx='sum', .* 'mean'"):
        store.record("x", 1.0, 1, "sum")

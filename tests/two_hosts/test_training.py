"""Ranks on two hosts train as one process does, whether they share memory or not."""

from __future__ import annotations

import pytest

from tests.training import TOLERANCE, assert_same, reference, tolerance_of
from tests.two_hosts.fleet import MEMORY, RANKS, Fleet
from tests.two_hosts.training import CASES, Fitted, Trained, fit, fit_alone, train_all


@pytest.fixture(scope="module", params=MEMORY)
def fleet(request: pytest.FixtureRequest, fleets: dict[str, Fleet]) -> Fleet:
    return fleets[request.param]


@pytest.fixture(scope="module")
def trained(fleet: Fleet) -> list[Trained]:
    """What the ranks end with."""
    return fleet.run(train_all)


def test_what_carries_headers(fleet: Fleet, trained: list[Trained]) -> None:
    """Memory, where all share it; where only some do, nobody uses it."""
    shared = fleet.memory == "one memory"
    expected = ("SharedMemoryLine", "SharedBoard") if shared else ("GroupLine", "StoreBoard")
    assert [each.ways for each in trained] == [expected] * RANKS


@pytest.mark.parametrize("name", CASES)
def test_training_equals_one_process(trained: list[Trained], name: str) -> None:
    states, case = [each.states[name] for each in trained], CASES[name]
    for state in states[1:]:
        assert_same(state, states[0])
    assert_same(states[0], reference(case), tolerance_of(case))


def test_fit_equals_one_process(fleet: Fleet) -> None:
    state, metrics = fit_alone()
    fitted: list[Fitted] = fleet.run(fit, RANKS, group=False)
    for own_state, own_metrics in fitted:
        assert_same(own_state, fitted[0][0])
        assert_same(own_state, state, TOLERANCE)
        assert own_metrics == pytest.approx(metrics, abs=TOLERANCE)

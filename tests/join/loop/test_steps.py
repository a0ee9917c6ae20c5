"""Loops in lockstep, with thread ranks: how long they are, what a batch weighs in its window, and how steps end."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import pytest
import torch

from join import EarlyTerminationError, Join, JoinError
from join.collectives import ThreadCollective, run_threads
from tests.join.counter import Counter, Leading, blames


@pytest.mark.parametrize(
    ("throw", "options", "length"),
    [
        (False, {}, 5),
        (False, {"until": "first"}, 2),
        (True, {}, 2),
        (False, {"window": 4, "fill_window": True}, 8),
        (False, {"window": 4}, 5),
    ],
)
def test_the_length_of_a_loop(throw: bool, options: dict[str, Any], length: int) -> None:
    def run(collective: ThreadCollective) -> int:
        found = 0
        with suppress(EarlyTerminationError), Join([Counter(collective)], True, throw) as join:
            loop = join.iterate([0] * (5, 2)[collective.rank], **options)
            found = len(loop)
            assert sum(1 for _ in loop) == found
        return found

    assert run_threads(2, run) == [length] * 2


def test_a_loop_of_which_one_loader_has_no_length() -> None:
    def run(collective: ThreadCollective) -> None:
        with Join([Counter(collective)]) as join:
            loop = join.iterate([0] if collective.rank else iter([0]))
            with pytest.raises(TypeError, match="the loader of a rank has none"):
                len(loop)
            list(loop)

    run_threads(2, run)


@pytest.mark.parametrize("batches", [(2, 2), (2, 0)])
def test_a_rank_that_only_asks_for_the_length(batches: tuple[int, int]) -> None:
    def run(collective: ThreadCollective) -> str:
        with pytest.raises(JoinError) as caught, Join([Counter(collective)]) as join:
            loop = join.iterate([0] * batches[collective.rank])
            assert len(loop) == 2
            if collective.rank:
                list(loop)
        return f"{type(caught.value).__name__}: {caught.value}"

    own, other = run_threads(2, run)
    assert re.match("ProtocolError: Rank 0 left the loop over join.iterate in step 0, but rank 1 continued it", own)
    assert blames(other, 0, own)


def test_early_termination_of_a_loop_until_the_first() -> None:
    def run(collective: ThreadCollective) -> int:
        steps = 0
        with pytest.raises(EarlyTerminationError), Join([Counter(collective)], True, True) as join:
            for _ in join.iterate([0] * (3, 1)[collective.rank], "first"):
                steps += 1
        return steps

    assert run_threads(2, run) == [1, 1]


# -- windows -----------------------------------------------------------------------------------------------------------


def shares(collective: ThreadCollective, initial: bool, options: dict[str, Any], enable: bool = True) -> Any:
    """What a loss of 1 becomes in each step, for an engine that averages over two ranks; and whether a window ends."""
    data = ([1, 2, 3], [4])[collective.rank]
    divisor = options.pop("divisor", 1)
    counter = Counter(collective)
    with Join([counter], enable, divide_by_initial_world_size=initial, loss_divided_by=divisor) as join:
        return [(join.scale(1.0), join.ends_window) for _ in join.iterate(data, **options)]


@pytest.mark.parametrize(
    ("initial", "options", "first", "second", "ends"),
    [
        (True, {"window": 2, "fill_window": True}, [1 / 2, 1 / 2, 1 / 2, 0], [1 / 2, 0, 0, 0], "-x-x"),
        (False, {"window": 2, "fill_window": True}, [2 / 3, 2 / 3, 2, 0], [2 / 3, 0, 0, 0], "-x-x"),
        (True, {"window": 2}, [1 / 2, 1 / 2, 1], [1 / 2, 0, 0], "-xx"),
        (False, {"window": "all"}, [1 / 2, 1 / 2, 1 / 2], [1 / 2, 0, 0], "--x"),
        (True, {"weigh": int}, [2 / 5, 2, 2], [8 / 5, 0, 0], "xxx"),
        (False, {"weigh": int, "window": 3, "lookahead": 2}, [2 / 10, 4 / 10, 6 / 10], [8 / 10, 0, 0], "--x"),
        (False, {"window": 2, "fill_window": True, "until": "first"}, [1, 0], [1, 0], "-x"),
        (False, {"divisor": 4}, [4, 8, 8], [4, 0, 0], "xxx"),
    ],
)
def test_the_share_of_a_batch_in_its_window(
    initial: bool, options: dict[str, Any], first: list[float], second: list[float], ends: str
) -> None:
    results = run_threads(2, lambda collective: shares(collective, initial, dict(options)))
    assert [factor for factor, _ in results[0]] == pytest.approx(first)
    assert [factor for factor, _ in results[1]] == pytest.approx(second)
    assert all([end for _, end in result] == [end == "x" for end in ends] for result in results)


def test_the_share_of_a_batch_in_a_block_that_is_not_enabled() -> None:
    """As if the other rank had the same batches."""
    first, _ = run_threads(2, lambda collective: shares(collective, False, {"window": 2}, enable=False))
    assert first == [(1 / 2, False), (1 / 2, True), (1, True)]


def test_a_loss_on_a_dummy_is_0_whatever_it_was() -> None:
    def run(collective: ThreadCollective) -> list[float]:
        with Join([Counter(collective)]) as join:
            steps = join.iterate([1.0] * collective.rank, dummy=lambda loss: loss * float("nan"))
            return [float(join.scale(torch.tensor(loss))) for loss in steps]

    assert run_threads(2, run) == [[0.0], [1.0]]


def test_dummies_that_fill_a_window_before_the_loader_ends() -> None:
    def run(collective: ThreadCollective) -> list[int]:
        data = [torch.ones(2)] * (3, 1)[collective.rank]
        with Join([Counter(collective)]) as join:
            return [len(x) for x in join.iterate(data, "first", window=2, fill_window=True)]

    assert run_threads(2, run) == [[2, 0]] * 2


# -- ends --------------------------------------------------------------------------------------------------------------


def test_a_break_after_a_follower_on_some_ranks() -> None:
    def run(collective: ThreadCollective) -> int:
        leading, follower = Leading(collective), Counter(collective)
        with Join([leading, follower]) as join:
            for _ in join.iterate([0, 0]):
                leading()
                if collective.rank == 1:
                    follower()
                break
        return follower.total

    assert run_threads(2, run) == [1, 1]


class Copied(Counter):
    """Notes how it is synchronised, and holds a value that may differ."""

    value = 0

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self.done: list[str] = []

    def exchange(self, source: int) -> None:
        self.done.append(f"all state from rank {source}")

    def synchronise_own(self, source: int) -> None:
        self.done.append(f"own state from rank {source}")

    def equal_values(self) -> dict[str, Any]:
        return {"value": self.value}


def test_no_state_is_copied_after_an_uneven_loop() -> None:
    def run(collective: ThreadCollective) -> list[str]:
        copied = Copied(collective)
        with Join([copied]) as join:
            for _ in join.iterate([0] * collective.rank):
                copied()
        return copied.done

    assert run_threads(2, run) == [["own state from rank 1"] * 2] * 2  # after the loop, and after the block


def test_all_state_is_copied_after_an_uneven_plain_loop() -> None:
    def run(collective: ThreadCollective) -> list[str]:
        copied = Copied(collective)
        with Join([copied]):
            for _ in range(collective.rank):
                copied()
        return copied.done

    assert run_threads(2, run) == [["all state from rank 1"]] * 2


def test_values_are_compared_at_the_end_of_each_loop() -> None:
    def run(collective: ThreadCollective) -> None:
        copied = Copied(collective)
        copied.value = collective.rank
        with pytest.raises(JoinError, match="the value of Copied is 0 on rank 0, 1 on rank 1"), Join([copied]) as join:
            list(join.iterate([0]))
            pytest.fail("the loop has ended without an error")

    run_threads(2, run)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_begins_a_loop_where_others_run_what_all_expect(ranks: int) -> None:
    """Their headers wait for nobody by then. A third rank is out of data."""

    def run(collective: ThreadCollective) -> str:
        counter = Counter(collective)
        with pytest.raises(JoinError) as caught, Join([counter]) as join:
            for _ in range((2, 3, 1)[collective.rank]):
                counter()
            if collective.rank < 2:
                list(join.iterate([0]))
        return str(caught.value)

    for text in run_threads(ranks, run):
        assert "2 active ranks announced different bursts: 1 x Counter, 1 x join.iterate" in text

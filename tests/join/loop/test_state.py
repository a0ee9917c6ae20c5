"""The state of a block: in the body of a loop, or not, however the loop was left; and a loop of one rank alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from typing import Any

import pytest
import torch

from join import Join, JoinError, ProtocolError
from join.collectives import ThreadCollective, run_threads
from tests.join.counter import Counter, Leading, blames


def loader(count: int, fails: bool, error: type[BaseException] = OSError) -> Iterator[int]:
    yield from range(count)
    if fails:
        raise error("disk")


def seen(join: Join) -> tuple[Any, ...]:
    return join.weight, join.shadowing, join.ends_window, join.is_last_step


PLAIN = None, False, True, False


WAYS = "ends", "is left", "body raises"


@pytest.mark.parametrize(("way", "enable"), [*product(WAYS, [True, False]), ("loader raises", False)])
def test_after_a_loop_a_block_is_plain(way: str, enable: bool) -> None:
    def run(collective: ThreadCollective) -> list[Any]:
        counter, found = Leading(collective), list[Any]()
        with Join([counter], enable=enable) as join:
            with suppress(OSError):
                for step in join.iterate(loader(4, way == "loader raises"), window=2):
                    found = [seen(join)[0]]
                    if step == 1 and way == "is left":
                        break
                    if step == 1 and way == "body raises":
                        raise OSError
            found.append(seen(join))
            counter()
            found += [join.weight for _ in join.iterate(range(2))]
        return [*found, seen(join)]

    assert run_threads(2, run) == [[1.0, PLAIN, 1.0, 1.0, PLAIN]] * 2


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [0, 2])
def test_an_error_of_a_loader_ends_the_block_even_if_its_rank_handles_it(at: int, error: type[BaseException]) -> None:
    def run(collective: ThreadCollective) -> str:
        counter = Leading(collective)
        with pytest.raises(JoinError) as caught, Join([counter]) as join:
            with suppress(error):
                for _ in join.iterate(loader(at, True, error) if collective.rank == 1 else range(3)):
                    counter()
            counter()
        return f"{type(caught.value).__name__}: {caught.value}"

    zero, one, two = run_threads(3, run)
    assert one.startswith(f"JoinError: The Join block has already ended (this rank raised {error.__name__})")
    assert blames(zero, 1, f"{error.__name__}: disk") and blames(two, 1, f"{error.__name__}: disk")


@pytest.mark.parametrize("timeout", [None, 5.0])
def test_after_an_error_that_the_body_handles_a_rank_sends_nothing(timeout: float | None) -> None:
    def run(collective: ThreadCollective) -> str:
        sent: list[int] = []
        with pytest.raises(JoinError) as caught, Join([Leading(collective)], timeout=timeout) as join:
            tally = join.channel.headers.tally
            for _ in join.iterate(range(3 * collective.rank)):
                sent.append(tally.headers)
                if collective.rank == 1:
                    with suppress(ProtocolError):
                        join.channel.guard.post_and_raise(ProtocolError("skipped"))
        assert collective.rank == 0 or sent == [tally.headers]
        return f"{type(caught.value).__name__}: {caught.value}"

    zero, one = run_threads(2, run)
    assert one.startswith("JoinError: The Join block has already ended (ProtocolError: skipped)")
    assert blames(zero, 1, "ProtocolError: skipped")


def test_a_dummy_that_cannot_be_made_and_a_rank_that_handles_it() -> None:
    def dummy(batch: Any) -> Any:
        raise OSError("disk")

    def run(collective: ThreadCollective) -> str:
        with pytest.raises(JoinError) as caught, Join([Leading(collective)]) as join, suppress(OSError):
            list(join.iterate(range(3 * collective.rank), dummy=dummy))
        return f"{type(caught.value).__name__}: {caught.value}"

    zero, one = run_threads(2, run)
    assert zero.startswith("ProtocolError: Rank 0 left the loop over join.iterate in step 1")
    assert blames(one, 0, zero)


def test_a_loop_alone_that_is_left_inside_a_window() -> None:
    with pytest.raises(JoinError, match="J467"), Join([torch.nn.Linear(1, 1)]) as join:
        for _ in join.iterate(range(4), window=2):
            break


def test_a_loop_alone_sends_nothing_and_starts_no_thread() -> None:
    threads = threading.active_count()
    with Join([torch.nn.Linear(1, 1)]) as join:
        for step in join.iterate(range(6), "first", dummy="last", window=4, lookahead=8, fill_window=True):
            if step == 0:
                assert join.pending == list(range(1, 6))
            assert threading.active_count() == threads
    assert not torch.distributed.is_initialized()
    assert step == 5


def test_a_block_that_a_loop_alone_fails_is_over() -> None:
    join = Join([torch.nn.Linear(1, 1)])
    with pytest.raises(OSError, match="disk"), join:
        for _ in join.iterate(range(2), weigh=lambda _: 3.0):
            raise OSError("disk")
    assert seen(join) == PLAIN
    with join:
        assert len(join.iterate(range(2))) == 2


def test_a_loader_that_asks_for_the_last_step_before_the_first() -> None:
    def run(collective: ThreadCollective) -> list[bool]:
        with Join([Leading(collective)]) as join:
            return list(join.iterate((join.is_last_step for _ in range(2)), window="all"))

    assert run_threads(2, run) == [[False, False]] * 2


def test_a_block_around_a_block_whose_loop_failed_is_plain() -> None:
    def run(collective: ThreadCollective) -> Any:
        with pytest.raises(JoinError, match="J063"), Join([Leading(collective)]) as outer:
            with suppress(OSError), Join([Leading(collective)]) as join:
                for _ in join.iterate(range(2)):
                    raise OSError("disk")
            assert seen(outer) == PLAIN

    run_threads(2, run)


def test_a_rank_that_leaves_alone_learns_it_where_another_ends_the_loop_for_all() -> None:
    """Rank 1 has run out after the step that rank 0 leaves by a break."""

    def run(collective: ThreadCollective) -> str:
        leading = Leading(collective)
        with pytest.raises(JoinError) as caught, Join([leading], throw_on_early_termination=True, timeout=30.0) as join:
            for step, _ in enumerate(join.iterate(range(3 - collective.rank))):
                if collective.rank == 0 and step == 1:
                    break
        return str(caught.value)

    assert all("Rank 0 left the loop over join.iterate in step 2" in text for text in run_threads(2, run))


@pytest.mark.parametrize("enable", [True, False])
def test_an_iterator_that_is_kept_yields_nothing_after_its_block(enable: bool) -> None:
    def run(collective: ThreadCollective) -> list[list[int]]:
        join, left = Join([Counter(collective)], enable=enable), list[list[int]]()
        with join:
            kept = iter(join.iterate([1, 2, 3, 4], lookahead=4))
            next(kept)
        left.append(list(kept))
        with join:
            left.append(list(kept))
            left.append(list(join.iterate([5, 6])))
        return left

    assert run_threads(2, run) == [[[], [], [5, 6]]] * 2

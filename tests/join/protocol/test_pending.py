"""Bursts that are announced before they run: whatever their rank does next, it first takes part in them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from typing_extensions import override

from join import Join
from join.collectives import ThreadCollective, run_threads
from tests.join.counter import Counter, Leading


class Early(Leading):
    """It may be announced long before it runs."""

    @override
    def attach(self, join: Join) -> None:
        self.channel = join.channel

    def announce(self) -> None:
        self.channel.announce(self)
        self.is_pending = True

    def run(self) -> None:
        self.is_pending = False
        self.inner.total += self.inner.reduce(1)

    @override
    def fulfil(self) -> None:
        self.is_pending = False
        self.inner.total += self.inner.reduce(0)


Parts = tuple[Early, Counter, Leading]
NEXT: dict[str, Callable[[Join, Parts], None]] = {
    "runs a follower": lambda join, parts: parts[1](),
    "announces another": lambda join, parts: parts[2](),
    "begins a loop": lambda join, parts: [None for _ in join.iterate([])].clear(),
    "leaves the block": lambda join, parts: None,
}


def skips(collective: ThreadCollective, what: str) -> list[int]:
    """Rank 0 has no data; the others announce a burst, skip it, and go on to something else."""
    parts = Early(collective, "early"), Counter(collective), Leading(collective, "other")
    with Join(parts) as join:
        if collective.rank or what == "begins a loop":
            parts[0].announce()
            NEXT[what](join, parts)
    return [parts[0].inner.total, parts[1].total, parts[2].inner.total]


@pytest.mark.parametrize("what", NEXT)
def test_a_burst_that_its_rank_skipped_runs_first(what: str) -> None:
    """Otherwise the sum of another one would be taken for it."""
    totals = [0, 2 * (what == "runs a follower"), 2 * (what == "announces another")]
    assert run_threads(3, lambda collective: skips(collective, what)) == [totals] * 3


def test_a_burst_that_runs_late_counts() -> None:
    def run(collective: ThreadCollective) -> int:
        early = Early(collective, "early")
        with Join([early]):
            for _ in range(collective.rank):
                early.announce()
                early.run()
        return early.inner.total

    assert run_threads(3, run) == [3] * 3

"""The link between two hosts is cut in mid-training: all ranks end, and say why."""

from __future__ import annotations

import time

import pytest

from tests.ending import End, Running, text_of
from tests.two_hosts.cuts import TRAINING, Loop, train_until_cut
from tests.two_hosts.fleet import MEMORY, Fleet
from tests.versions import is_2_8

HALF_AN_HOUR = 1800.0  # seconds
LIMITED = [Loop(iterate, group_timeout=10.0) for iterate in (False, True)]
TIMED = [Loop(iterate, timeout=5.0) for iterate in (False, True)]
BUSY = [Loop(iterate, timeout=5.0, busy=True) for iterate in (False, True)]
LOOPS = {
    "one memory": TIMED,  # there, headers come through, and bursts do not
    "each host its own memory": [*TIMED, *LIMITED, *BUSY],
}
LOOPS = {memory: loops for memory, loops in LOOPS.items() if memory in MEMORY}
if is_2_8:  # as needs_gloo_with_limits
    LOOPS = {"each host its own memory": LIMITED}
CELLS = [(memory, loop) for memory, loops in LOOPS.items() for loop in loops]


@pytest.fixture(scope="module")
def cut(fleets: dict[str, Fleet]) -> tuple[dict[tuple[str, Loop], Running], float]:
    """What runs where, and when all links were cut, in the middle of all loops at once."""
    running: dict[tuple[str, Loop], Running] = {}
    for memory, loop in CELLS:
        limit = loop.group_timeout or HALF_AN_HOUR
        running[memory, loop] = fleets[memory].start(train_until_cut, loop, timeout=limit)
    for each in running.values():
        each.wait_until_said(TRAINING)
    at = time.time()
    for memory in LOOPS:
        fleets[memory].cut()
    return running, at


@pytest.mark.parametrize(("memory", "loop"), CELLS, ids=str)
def test_all_end(cut: tuple[dict[tuple[str, Loop], Running], float], memory: str, loop: Loop) -> None:
    running, at = cut
    ends = running[memory, loop].ends(limit=at + loop.seconds - time.time())
    for end in ends:
        assert end.code == 1, text_of(ends, at)
        assert end.at > at, text_of(ends, at)
        assert _says_why(end, loop), text_of(ends, at)


def _says_why(end: End, loop: Loop) -> bool:
    if end.error.startswith(("JoinTimeoutError: ", "PeerError: ")):
        return True
    # The first one to whom a collective of its own tells, where nobody was to watch over time.
    return loop.timeout is None and end.error.startswith("RuntimeError: ")

"""The link between two hosts is cut in mid-training: all ranks end, and say why."""

from __future__ import annotations

import pytest

from tests.ending import End
from tests.two_hosts.cuts import TRAINING, Loop, train_until_cut
from tests.two_hosts.fleet import MEMORY, Fleet, text_of
from tests.two_hosts.ranks import Call
from tests.versions import is_2_8

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
CALLS = {
    (memory, loop): Call(f"cut-{number}", train_until_cut, (loop,), timeout=loop.group_timeout)
    for memory, loops in LOOPS.items()
    for number, loop in enumerate(loops)
}


@pytest.fixture(scope="module")
def cut_at(fleets: dict[str, Fleet]) -> dict[str, float]:
    """When each link was cut, in the middle of all loops at once."""
    calls = {memory: [CALLS[memory, loop] for loop in loops] for memory, loops in LOOPS.items()}
    for memory in calls:
        fleets[memory].start(calls[memory])
    for memory in calls:
        fleets[memory].wait_until_said(TRAINING, calls[memory])
    return {memory: fleets[memory].cut() for memory in calls}


@pytest.mark.parametrize(("memory", "loop"), CALLS, ids=str)
def test_all_end(fleets: dict[str, Fleet], cut_at: dict[str, float], memory: str, loop: Loop) -> None:
    cut = cut_at[memory]
    ends = fleets[memory].ends(CALLS[memory, loop], deadline=cut + loop.seconds)
    for end in ends:
        assert end.code == 1, text_of(ends, cut)
        assert end.at > cut, text_of(ends, cut)
        assert _says_why(end, loop), text_of(ends, cut)


def _says_why(end: End, loop: Loop) -> bool:
    if end.error.startswith(("JoinTimeoutError: ", "PeerError: ")):
        return True
    # The first one to whom a collective of its own tells, where nobody was to watch over time.
    return loop.timeout is None and end.error.startswith("RuntimeError: ")

"""A test that is ended by its limit leaves no rank that the next test meets."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.ending import Ending
from tests.harness import Pool


def hangs(rank: int) -> None:
    time.sleep(100)


def number(rank: int) -> int:
    return rank


@pytest.mark.parametrize("kind", ["pool", "ending"])
def test_the_next_test_has_ranks(request: pytest.FixtureRequest, kind: str) -> None:
    ranks: Pool | Ending = request.getfixturevalue(kind)
    assert ranks.run(number) == [0, 1, 2]
    with pytest.raises(pytest.fail.Exception, match="a limit"):
        limited(lambda: ranks.run(hangs))
    assert ranks.run(number) == [0, 1, 2]


def limited(call: Callable[[], Any]) -> None:
    """Call a function, which is interrupted half a second later, as pytest-timeout does it."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("a limit"))
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

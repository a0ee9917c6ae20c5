"""The error that a rank raises for what it knows of the others, and ranks that say no more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from join import JoinTimeoutError, PeerError
from join.collectives import run_threads
from join.collectives.board import Note, Progress
from join.collectives.broken import BrokenCollective
from join.errors import JoinError
from join.failure import guard
from join.failure.guard import Guard
from join.failure.watch import News
from tests.shorter import using

OWN, LATE = Note(1, 1, "ValueError", "rank 1 failed: mine"), Note(2, 2, "JoinTimeoutError", "rank 2 waited")


def knowing(news: News, aborted_for: News | None = None, *, is_lost: bool = False) -> Guard:
    """Those of rank 0 of three, whose watch has read this."""
    found = run_threads(3, lambda collective: Guard(collective, Progress))[0]
    watched: Any = SimpleNamespace(news=news, aborted_for=aborted_for, is_lost=is_lost)
    found.watch = SimpleNamespace(block=watched, post=lambda *_: None)  # pyright: ignore[reportAttributeAccessIssue]
    return found


@pytest.mark.parametrize(
    ("news", "aborted_for", "is_lost", "error", "told"),
    [
        (News(ended=[1]), None, True, PeerError, "rank 1 is gone"),
        (News(), News(ended=[1]), False, PeerError, "rank 1 is gone"),
        (News([OWN]), News(ended=[1]), False, PeerError, "rank 1 failed: mine. "),  # which came after the abort
        (News([OWN, LATE]), None, False, PeerError, "rank 1 failed: mine; rank 2 waited. "),
        (News([LATE]), None, False, JoinTimeoutError, "rank 2 waited. "),
    ],
)
def test_the_best_cause_is_told(
    news: News, aborted_for: News | None, is_lost: bool, error: type[JoinError], told: str
) -> None:
    with pytest.raises(error) as caught:
        knowing(news, aborted_for, is_lost=is_lost).look()
    assert type(caught.value) is error and str(caught.value).startswith(told)


def test_a_rank_that_has_left_the_group_may_end() -> None:
    knowing(News(ended=[1])).look()


def test_a_store_that_is_gone_is_told_at_once() -> None:
    """No rank is blamed for it."""
    asking = knowing(News())
    asking.watch.refresh = lambda *_, **__: False
    error = asking.cause_of(BrokenCollective("closed"))
    assert isinstance(error, PeerError) and error.rank is None and "store" in str(error)


def test_a_rank_is_silent_while_this_one_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(guard, "time", SimpleNamespace(monotonic=lambda: now))
    asking, found = knowing(News()), list[list[int]]()
    for passed, beat, done in [
        *[(0.0, 1, False), (99.0, 1, False), (0.4, 1, False), (0.4, 1, False)],  # once, all were suspended
        *[(0.4, 2, False), (0.4, 2, False), (0.4, 2, True), (9.0, 2, True), (0.4, 2, False), (0.4, 2, False)],
    ]:
        now += passed
        with using(look=0.1):
            found.append(asking.silent({1: Progress(beat=beat, done=done), 2: Progress(done=True)}, 1.0))
    assert found == [[], [], [], [1], [], [], [], [], [], []]

"""The channel of a group, over blocks and loops: with thread ranks."""

from __future__ import annotations

from typing import Any

import pytest

from join import Burst, Join, JoinError, JoinReport, ProtocolError
from join.collectives import ThreadCollective, run_threads
from join.joinable import OnGroup
from tests.join.counter import Counter, Leading


def filled(collective: ThreadCollective) -> tuple[JoinReport, bool | None]:
    counter = Counter(collective)
    with Join([counter]) as join:
        for _ in join.iterate([1, 2, 3], window=2, fill_window=True):
            counter()
    return join.report, counter.last_joiner


def test_a_step_that_fills_a_window_makes_no_rank_uneven() -> None:
    for report, last_joiner in run_threads(2, filled):
        assert report.even
        assert last_joiner is True


def doings(collective: ThreadCollective) -> list[str]:
    counter = Counter(collective)
    texts: list[str] = []
    with Join([counter]) as join:
        texts.append(join.channel.progress().doing)
        for _ in join.iterate([1]):
            texts.append(join.channel.progress().doing)
            counter()
            texts.append(join.channel.progress().doing)
    return texts


def test_a_rank_in_its_loop_has_not_run_out() -> None:
    for texts in run_threads(2, doings):
        assert [text.partition(" (")[0] for text in texts] == ["has announced nothing"] * 2 + ["announced Counter"]


def with_a_block_before_the_follower(collective: ThreadCollective) -> str:
    leading, follower, inner = Leading(collective, "leading"), Counter(collective), Leading(collective, "inner")
    with pytest.raises(JoinError) as caught, Join([leading, follower]):
        leading()
        with Join([inner]):
            inner()
        follower()
    return str(caught.value)


def test_a_follower_acts_before_another_block_is_entered() -> None:
    texts = run_threads(2, with_a_block_before_the_follower)
    assert any("Counter did not notify before another block was entered" in text for text in texts)
    assert not any("J082" in text for text in texts)


def goes_on_after_an_inner_block(collective: ThreadCollective) -> list[str]:
    class Unequal(Counter):
        def equal_values(self) -> dict[str, Any]:
            return {"rank": self.group.rank}

    outer = Leading(collective, "outer")
    texts: list[str] = []
    with pytest.raises(JoinError) as caught, Join([outer]):
        try:
            with Join([Unequal(collective)]):
                pass
        except ProtocolError as error:
            texts.append(str(error))
        outer()
    return [*texts, str(caught.value)]


def test_nothing_is_announced_after_an_inner_block_that_failed() -> None:
    for inner, outer in run_threads(2, goes_on_after_an_inner_block):
        assert "J441" in inner
        assert "The Join block has already ended" in outer


class Led(OnGroup, Burst):
    """Notes who leads in each of its bursts."""

    tracks_leader = True

    def __init__(self, collective: ThreadCollective) -> None:
        super().__init__(collective)
        self.leaders: list[int] = []

    def attach(self, join: Join) -> None:
        self.channel = join.channel

    def __call__(self) -> None:
        self.channel.announce(self)
        self.main_hook()

    def main_hook(self) -> None:
        self.leaders.append(self.channel.headers.leader_for(self))


def test_a_rank_with_data_leads_from_the_first_burst_on() -> None:
    def run(collective: ThreadCollective) -> list[int]:
        led = Led(collective)
        with Join([led]):
            for _ in range((0, 2, 4)[collective.rank]):
                led()
        return led.leaders

    assert run_threads(3, run) == [[1, 1, 1, 2]] * 3  # in a burst that all expect, the leader is that of the one before

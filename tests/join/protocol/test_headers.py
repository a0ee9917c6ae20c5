"""Headers: what is packed comes out summed, for any number of ranks and bursts, in few bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from join.protocol.headers import ACTIVE, ELSEWHERE, FRESH, LEADER, Foresight, HeaderCode


@given(st.data())
def test_sums_of_any_contributions(data: st.DataObject) -> None:
    world_size = data.draw(st.sampled_from([1, 2, 4, 1024]) | st.integers(1, 2000))  # powers of 2 need one bit more
    flag_counts = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    code = HeaderCode(flag_counts, world_size)
    fields = 4 + sum(1 + count for count in flag_counts)
    sums = [data.draw(st.just(world_size) | st.integers(0, world_size)) for _ in range(fields)]
    sums[LEADER] = min(sums[LEADER], 1)
    total = sum(count * one for count, one in zip(sums, code.ones, strict=True))
    assert total < 1 << code.bits
    header = code.unpack(total)
    assert (header.elsewhere, header.active, header.fresh) == (sums[ELSEWHERE], sums[ACTIVE], sums[FRESH])
    assert header.leader_alive is (sums[LEADER] > 0)
    start = 4
    for index, count in enumerate(flag_counts):
        assert header.announcements.get(index, 0) == sums[start]
        assert list(header.counts[index]) == sums[start : start + 1 + count]
        start += 1 + count
    assert header.diverged is any(count not in (0, header.active) for count in header.announcements.values())


def test_a_header_is_one_word_for_one_module_and_grows_with_the_logarithm_of_ranks() -> None:
    ddp = [0, 1, 3]  # bucket rebuild, buffers, gradients
    assert HeaderCode(ddp, 3).bits <= 32
    assert HeaderCode(ddp, 63).bits <= 63
    assert HeaderCode(ddp, 1023).bits == 101


def test_several_fields() -> None:
    code = HeaderCode([3] * 10, 1000)
    header = code.unpack(sum(code.ones[place] for place in (ACTIVE, code.offsets[9], code.offsets[9] + 3)))
    assert header.announcements == {9: 1}
    assert list(header.counts[9][1:]) == [0, 0, 1]


class Bursts:
    """The part of a roster that a prediction reads: so many bursts, of which the last one interjects."""

    first = None

    def __init__(self, count: int) -> None:
        self.announcing = [
            SimpleNamespace(burst=SimpleNamespace(interjects=index == count)) for index in range(count + 1)
        ]


@pytest.mark.parametrize("often", [4, 200])  # after so many, the oldest bursts are forgotten
def test_the_next_burst_is_that_of_the_period(often: int) -> None:
    foresight = Foresight(cast("Any", Bursts(3)))
    guessed = list[bool]()
    for index in [*(0, 1) * often, *(0, 1, 2) * often, 3, 0, 1, 2]:
        guessed.append(foresight.expected == index)
        foresight.saw(index)
    first, second = guessed[: 2 * often], guessed[2 * often :]
    assert first == [False] * 3 + [True] * (len(first) - 3)
    assert second == [True] * 2 + [False] * 2 + [True] * (3 * often - 4) + [False, True, True, True]

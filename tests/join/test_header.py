"""Headers: what is packed comes out summed, for any number of ranks and bursts, in few words."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from join.header import ACTIVE, FAILED, FRESH, LEADER, STOPPING, HeaderBuffer


@given(st.data())
def test_sums_of_any_contributions(data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, 2000))
    flag_counts = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    buffer = HeaderBuffer(flag_counts, world_size)
    fields = 5 + sum(1 + count for count in flag_counts)
    sums = [data.draw(st.integers(0, world_size)) for _ in range(fields)]
    total = torch.zeros_like(buffer.tensor)
    for field, count in enumerate(sums):
        total += buffer.pack([field]) * count
    buffer.tensor.copy_(total)
    header = buffer.unpack()
    assert list(header.counts) == sums
    assert (header.active, header.failed, header.fresh) == (sums[ACTIVE], sums[FAILED], sums[FRESH])
    assert (header.leader_alive, header.stopping) == (sums[LEADER] > 0, sums[STOPPING] > 0)
    start = 5
    for index, count in enumerate(flag_counts):
        assert header.announcements.get(index, 0) == sums[start]
        assert list(header.flags(index)) == sums[start + 1 : start + 1 + count]
        start += 1 + count
    assert header.diverged is any(count not in (0, header.active) for count in header.announcements.values())


def test_a_header_is_one_word_for_one_module_and_grows_with_the_logarithm_of_ranks() -> None:
    ddp = [0, 0, 3]  # bucket rebuild, buffers, gradients
    assert HeaderBuffer(ddp, 2).nbytes == 8
    assert HeaderBuffer(ddp, 31).nbytes == 8
    assert HeaderBuffer(ddp, 1023).nbytes == 16
    assert HeaderBuffer([*ddp, 0], 100_000).nbytes == 32


def test_several_fields_in_several_words() -> None:
    buffer = HeaderBuffer([3] * 10, 1000)
    assert buffer.tensor.numel() > 1
    buffer.pack([ACTIVE, buffer.offsets[9], buffer.offsets[9] + 3])
    header = buffer.unpack()
    assert header.announcements == {9: 1}
    assert list(header.flags(9)) == [0, 0, 1]

"""Where ranks may leave a loop: all in one place."""

from __future__ import annotations

import pytest

from join.collectives import SingleCollective
from join.collectives.board import Progress
from join.protocol.progress import LoopProgress


class OfTwo(SingleCollective):
    """Rank 0 of two."""

    world_size = 2


@pytest.mark.parametrize(
    ("other", "agrees"),
    [
        (Progress(loop=2, step=3, bursts=5, left=True), True),
        (Progress(loop=2, step=3, bursts=5, left=False), False),
        (Progress(loop=2, step=2, bursts=5, left=True), False),
        (Progress(loop=2, step=3, bursts=4, left=True), False),
        (Progress(loop=1, step=3, bursts=5, left=True), False),
        (Progress(loop=3, step=1, bursts=0, left=False), True),  # it has agreed, and gone on
        (None, False),  # it has not told yet
    ],
)
def test_all_ranks_have_left_in_one_place(other: Progress | None, agrees: bool) -> None:
    progress = LoopProgress(OfTwo(), 2)
    progress.steps, progress.bursts = 3, 5
    assert progress.all_have_left_here({} if other is None else {1: other}) is agrees

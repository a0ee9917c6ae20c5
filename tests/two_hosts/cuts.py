"""Loops that go on until the link between the hosts is cut."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from join import Join
from tests.ending import say

WITH_DATA = (0, 2)  # one rank on each host; the other one there has none
TRAINING = "training"
_SPARE_SECONDS = 30.0  # half of them for a machine on which much else is going on


@dataclass(frozen=True)
class Loop:
    """How ranks train.

    Attributes:
        iterate: whether over ``join.iterate``.
        timeout: as given to ``Join``.
        group_timeout: that of the process group, in seconds; torch's, which is half an hour, if none.
        busy: whether ranks are in bursts most of the time, or between them.
    """

    iterate: bool = False
    timeout: float | None = None
    group_timeout: float | None = None
    busy: bool = False

    def __str__(self) -> str:
        name = "iterate" if self.iterate else "plain"
        limit = f"timeout={self.timeout:g}" if self.timeout else f"group's timeout of {self.group_timeout:g} s"
        return f"{name}, {limit}, {'in bursts' if self.busy else 'between bursts'}"

    @property
    def seconds(self) -> float:
        """In which all ranks are to end, once the link is cut: some more than an operation of the group may take."""
        return _SPARE_SECONDS + (self.group_timeout or 2 * (self.timeout or 0.0))


def train_until_cut(rank: int, loop: Loop) -> None:
    """Train for ever; a rank without data has run out from the start."""
    width, layers = (1024, 8) if loop.busy else (8, 3)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    mine = _endless(width) if rank in WITH_DATA else iter(())
    with Join([model, optimizer], timeout=loop.timeout) as join:
        for step, x in enumerate(join.iterate(mine) if loop.iterate else mine):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if step == 3:
                say(TRAINING, True)
            if not loop.busy:
                time.sleep(0.2)
        say(TRAINING, True)  # it has run out


def _endless(width: int) -> Iterator[torch.Tensor]:
    while True:
        yield torch.ones(1, width)

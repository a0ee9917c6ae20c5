"""Benchmark of blocks over a module of many small tensors, in processor time, against torch's own ``Join``.

Two gloo processes open blocks of three kinds, in these ways:

    empty     torch's Join, and Join: no rank has a batch
    uneven    torch's Join, Join, and join.iterate: rank 0 has a few batches, and rank 1 has none

The optimizer is SGD without momentum, because torch's ``Join`` copies no state of optimizers. A block is measured from
entering to leaving, on each rank by itself. The ways take turns, and each round draws a new order, so other load
affects all of them alike. Torch's ``Join`` is measured twice; the difference of the two is noise. It has a module of
its own, because no other way can use a module after it. The table has the median of the ratios of each round.

    ms      processor time of a rank for a block, all threads
    ratio   to that rank's time in torch's Join, of the same round
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common import run_processes, save, table
from torch import nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel as DDP

from join import Join

WARM_UP_BLOCKS = 2
INPUTS = torch.ones(2, 4)


class ManyTensors(nn.Module):
    """Module whose cost is that of its many parameters.

    Args:
        tensors: The number of parameters.
    """

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.full((4,), 1e-3)) for _ in range(tensors))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * torch.stack(list(self.parts)).sum(0)


class Ways:
    """The ways of training on one rank: each is a function that runs one block.

    Args:
        tensors: The number of parameters.
        batches: The number of rank 0's batches in an uneven block.
    """

    def __init__(self, tensors: int, batches: int) -> None:
        self._batches = batches if dist.get_rank() == 0 else 0
        self._theirs, self._ours = (DDP(ManyTensors(tensors)) for _ in range(2))
        self._rates = {ddp: torch.optim.SGD(ddp.parameters(), lr=1e-3) for ddp in (self._theirs, self._ours)}

    def torch_join(self, uneven: bool) -> None:
        with TorchJoin([self._theirs]):
            self._train(self._theirs, uneven)

    def join(self, uneven: bool) -> None:
        with Join([self._ours, self._rates[self._ours]]):
            self._train(self._ours, uneven)

    def iterate(self, uneven: bool) -> None:
        with Join([self._ours, self._rates[self._ours]]) as join:
            for inputs in join.iterate([INPUTS] * self._batches):
                self._step(self._ours, inputs)

    def _train(self, ddp: DDP, uneven: bool) -> None:
        for _ in range(self._batches if uneven else 0):
            self._step(ddp, INPUTS)

    def _step(self, ddp: DDP, inputs: torch.Tensor) -> None:
        self._rates[ddp].zero_grad()
        ddp(inputs).square().mean().backward()
        self._rates[ddp].step()


KINDS: dict[str, dict[str, Callable[[Ways], None]]] = {
    "empty": {
        "torch's Join": partial(Ways.torch_join, uneven=False),
        "torch's Join, again": partial(Ways.torch_join, uneven=False),
        "Join": partial(Ways.join, uneven=False),
    },
    "uneven": {
        "torch's Join": partial(Ways.torch_join, uneven=True),
        "torch's Join, again": partial(Ways.torch_join, uneven=True),
        "Join": partial(Ways.join, uneven=True),
        "join.iterate": partial(Ways.iterate, uneven=True),
    },
}


def measure(tensors: int, batches: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of processor time of each way's blocks on this rank, by kind and way."""
    torch.set_default_device(None)  # whose mode runs Python code around each function of torch
    warnings.simplefilter("ignore")  # torch's Join warns of its own end
    ways, draw = Ways(tensors, batches), random.Random(0)
    calls = {f"{kind}: {way}": call for kind, those in KINDS.items() for way, call in those.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(WARM_UP_BLOCKS + rounds):
        for name in draw.sample(list(calls), len(calls)):
            dist.barrier()
            began = time.process_time()
            calls[name](ways)
            if number >= WARM_UP_BLOCKS:
                seconds[name].append(time.process_time() - began)
    return seconds


def summarise(ranks: list[dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Return one entry for each kind and way."""
    entries: list[dict[str, Any]] = []
    for name in ranks[0]:
        entry: dict[str, Any] = {"name": name}
        base = f"{name.partition(':')[0]}: torch's Join"
        for rank, seconds in enumerate(ranks):
            ratios = [mine / theirs for mine, theirs in zip(seconds[name], seconds[base], strict=True)]
            entry[f"ms_{rank}"] = statistics.median(seconds[name]) * 1e3
            entry[f"ratio_{rank}"] = statistics.median(ratios)
        entries.append(entry)
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=5000, help="parameters of the module")
    parser.add_argument("--batches", type=int, default=5, help="rank 0's batches in an uneven block")
    parser.add_argument("--rounds", type=int, default=15, help="blocks of each way")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    options = parser.parse_args()
    entries = summarise(run_processes(2, measure, options.tensors, options.batches, options.rounds))
    head = ["", "rank 0", "ratio", "rank 1", "ratio"]
    rows = [
        [entry["name"], *(f(entry) for rank in (0, 1) for f in (partial(_ms, rank=rank), partial(_ratio, rank=rank)))]
        for entry in entries
    ]
    print(table(head, rows))
    save(options.json, tensors=options.tensors, batches=options.batches, rounds=options.rounds, results=entries)


def _ms(entry: dict[str, Any], rank: int) -> str:
    return f"{entry[f'ms_{rank}']:.0f} ms"


def _ratio(entry: dict[str, Any], rank: int) -> str:
    return f"{entry[f'ratio_{rank}']:.2f}"


if __name__ == "__main__":
    main()

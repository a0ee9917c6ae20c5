"""What ``Join`` costs an active rank while inputs are even.

Two gloo processes train the same models in several ways: plain ``DistributedDataParallel``, inside torch's own
``torch.distributed.algorithms.join.Join``, inside ours, inside ours with ``divide_by_initial_world_size=False``, which
needs to know in each step how many ranks contribute, inside ours with ``steps=``, and over ``join.iterate`` with
``lookahead`` 1 and 4. Every way has its own modules and optimizers, on a process group of its own.

All contexts are open all the time, and the ways take turns of a few steps, in an order that is drawn anew for each
round, so that whatever else the machine does hits all of them alike. The first step of a turn is not measured. A way's
ratio is its time over that of plain DDP in the same round; the table gives the median over ``--rounds`` rounds and, in
brackets, where it lies with 95 % confidence. Where a model lies in memory makes some percent of difference, so the
processes are started several times, and build their models in other orders. Plain DDP is there twice: what the second
differs from the first is noise.

    step    wall time of a step, mean of the ranks: the only figure that shows waiting; noise on a shared machine
    CPU     processor time of a step, all threads of all ranks together: depends less on who else computes
    added   what the median ratio of CPU time comes to in microseconds a step and rank

Collectives and their bytes are counted with ``torch.profiler``, in a turn of its own, on rank 0: gloo records one
``gloo:*`` event for each operation, with shape and type. Bytes are those of the tensors, not of the wire.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, repeat
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from common import run_processes, save, table
from torch import nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.algorithms.join import Joinable as TorchJoinable
from torch.nn.parallel import DistributedDataParallel as DDP

from join import Join

WORLD_SIZE = 2
WARM_UP_STEPS = 3  # DDP rebuilds its buckets after the first
COUNTED_STEPS = 12
SETTLING_STEPS = 5
_ITEM_BYTES = {"double": 8, "long int": 8, "float": 4, "int": 4, "unsigned char": 1, "bool": 1}

# -- what is trained --------------------------------------------------------------------------------------------------


Group: TypeAlias = dist.ProcessGroup


@dataclass(frozen=True)
class Training:
    """A training step and the objects that it trains."""

    step: Callable[[], None]
    modules: list[DDP]
    optimizers: list[torch.optim.Optimizer]


def supervised(group: Group, model: nn.Module, inputs: torch.Tensor, *, zero: bool = False) -> Training:
    ddp = DDP(model, process_group=group)
    optimizer = sharded(ddp, group) if zero else torch.optim.SGD(ddp.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()

    return Training(step, [ddp], [optimizer])


def sharded(ddp: DDP, group: Group) -> torch.optim.Optimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, from importing it
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, process_group=group, lr=1e-3)


def small_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def mlp(group: Group) -> Training:
    return supervised(group, small_mlp(), torch.randn(256, 128))


def cnn(group: Group) -> Training:
    def block(before: int, after: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, stride, padding=1), nn.BatchNorm2d(after), nn.ReLU()]

    layers = [*block(3, 16, 1), *block(16, 32, 2), *block(32, 64, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return supervised(group, nn.Sequential(*layers, nn.Linear(64, 10)), torch.randn(8, 3, 32, 32))


def transformer(group: Group) -> Training:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return supervised(group, nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(1, 32, 256))


def mlp_zero(group: Group) -> Training:
    return supervised(group, small_mlp(), torch.randn(256, 128), zero=True)


def gan(group: Group) -> Training:
    """One update of the discriminator, one of the generator; the second runs backward through both."""
    generator = DDP(nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 128)), process_group=group)
    discriminator = DDP(nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 1)), process_group=group)
    update_g = torch.optim.SGD(generator.parameters(), lr=1e-3, momentum=0.9)
    update_d = torch.optim.SGD(discriminator.parameters(), lr=1e-3, momentum=0.9)
    noise, real = torch.randn(256, 32), torch.randn(256, 128)

    def step() -> None:
        update_d.zero_grad()
        with torch.no_grad():
            fake = generator(noise)
        scores = discriminator(torch.cat([real, fake]))
        (scores[256:] - scores[:256]).mean().backward()
        update_d.step()
        update_g.zero_grad()
        discriminator(generator(noise)).mean().neg().backward()
        update_g.step()

    return Training(step, [generator, discriminator], [update_g, update_d])


def plain(training: Training, steps: int) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


def torch_join(training: Training, steps: int) -> contextlib.AbstractContextManager[Any]:
    sharded_ones = [optimizer for optimizer in training.optimizers if isinstance(optimizer, TorchJoinable)]
    return TorchJoin([*training.modules, *sharded_ones])


def our_join(training: Training, steps: int) -> contextlib.AbstractContextManager[Any]:
    return Join([*training.modules, *training.optimizers])


def our_join_by_active(training: Training, steps: int) -> contextlib.AbstractContextManager[Any]:
    return Join([*training.modules, *training.optimizers], divide_by_initial_world_size=False)


def our_join_declared(training: Training, steps: int) -> contextlib.AbstractContextManager[Any]:
    return Join([*training.modules, *training.optimizers], steps=steps)


@contextlib.contextmanager
def lockstep(training: Training, steps: int, lookahead: int) -> Iterator[Iterator[int]]:
    with our_join(training, steps) as join:
        numbers = join.iterate(range(steps), lookahead=lookahead)
        yield numbers
        assert next(numbers, None) is None  # its end, which is not measured


Way = Callable[[Training, int], contextlib.AbstractContextManager[Any]]
"""A context for a block of so many steps; it may hand out an iterator that is to be advanced before each of them."""
WAYS: dict[str, Way] = {
    "plain": plain,
    "plain, again": plain,
    "torch's Join": torch_join,
    "Join": our_join,
    "Join, mean over contributors": our_join_by_active,
    "Join, declared steps": our_join_declared,
    "join.iterate": partial(lockstep, lookahead=1),
    "join.iterate, lookahead=4": partial(lockstep, lookahead=4),
}
CASES: dict[str, tuple[Callable[[Group], Training], list[str]]] = {
    "MLP": (mlp, list(WAYS)),
    "CNN with BatchNorm": (cnn, list(WAYS)),
    "transformer": (transformer, list(WAYS)),
    "MLP with ZeRO": (mlp_zero, list(WAYS)),
    "GAN": (
        gan,
        ["plain", "plain, again", "Join", "join.iterate", "join.iterate, lookahead=4"],
    ),  # torch's Join hangs on it as soon as inputs are uneven
}

# -- measuring --------------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """One way of training one model on one rank; seconds a step, one entry a round, and counts a step."""

    wall: list[float] = field(default_factory=list[float])
    cpu: list[float] = field(default_factory=list[float])
    collectives: float = 0.0
    nbytes: float = 0.0
    kinds: dict[str, float] = field(default_factory=dict[str, float])


def measure(case: str, ways: list[str], steps: int, rounds: int, launch: int) -> dict[str, Measured]:
    """On each rank: time and count these ways of training a model, as far as it can be trained so."""
    build, possible = CASES[case]
    draw = random.Random(launch)  # the same on all ranks
    names = [name for name in possible if name in ways]
    draw.shuffle(names)  # who is built first has other memory
    results = {name: Measured() for name in names}
    total = SETTLING_STEPS + rounds * (1 + steps) + COUNTED_STEPS
    with contextlib.ExitStack() as blocks:
        blocks.enter_context(warnings.catch_warnings())  # torch's Join rewrites the filters
        takes: dict[str, Callable[[int], None]] = {}
        for name in names:
            takes[name] = blocks.enter_context(opened(build, WAYS[name], total))
        for _ in range(rounds):
            for name in draw.sample(names, len(names)):
                takes[name](1)
                cpu, wall = time.process_time(), time.perf_counter()
                takes[name](steps)
                results[name].wall.append((time.perf_counter() - wall) / steps)
                results[name].cpu.append((time.process_time() - cpu) / steps)
        for name in names:
            dist.barrier()
            count_collectives(takes[name], results[name])
    return results


@contextlib.contextmanager
def opened(build: Callable[[Group], Training], way: Way, total: int) -> Iterator[Callable[[int], None]]:
    """A way of training a model, warm; a function that makes so many steps, of which ``total`` come in all."""
    torch.manual_seed(0)
    training = build(cast("Group", dist.new_group()))
    for _ in range(WARM_UP_STEPS):
        training.step()
    with way(training, total) as given:
        numbers: Iterator[Any] = given if isinstance(given, Iterator) else repeat(0)

        def take(steps: int) -> None:
            for _ in islice(numbers, steps):
                training.step()

        take(SETTLING_STEPS)
        yield take


def count_collectives(take: Callable[[int], None], measured: Measured) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True) as profile:
        take(COUNTED_STEPS)
        dist.barrier()
    kinds: Counter[str] = Counter()
    for event in profile.profiler.kineto_results.events():
        kind = event.name().removeprefix("gloo:")
        if kind == event.name() or kind == "barrier":
            continue
        kinds[kind] += 1
        for shape, item in zip(event.shapes(), event.dtypes(), strict=True):
            measured.nbytes += torch.Size(shape).numel() * _ITEM_BYTES[item] / COUNTED_STEPS
    measured.kinds = {kind: number / COUNTED_STEPS for kind, number in sorted(kinds.items())}
    measured.collectives = kinds.total() / COUNTED_STEPS


# -- reporting --------------------------------------------------------------------------------------------------------


def together(launches: list[list[Measured]]) -> Measured:
    """What each rank measured in each launch. Wall time: the mean of the ranks; processor time: their sum."""
    wall = [statistics.fmean(each) for ranks in launches for each in zip(*[rank.wall for rank in ranks], strict=True)]
    cpu = [sum(each) for ranks in launches for each in zip(*[rank.cpu for rank in ranks], strict=True)]
    return replace(launches[0][0], wall=wall, cpu=cpu)


def ratios(values: list[float], base: list[float]) -> tuple[float, float, float]:
    """The median of the ratios, round by round, and the ends of its interval of 95 % confidence."""
    pairs = sorted(value / reference for value, reference in zip(values, base, strict=True))
    half = 0.98 * math.sqrt(len(pairs))  # by the binomial distribution of how many lie below the true median
    low = max(0, math.floor(len(pairs) / 2 - half))
    return statistics.median(pairs), pairs[low], pairs[-1 - low]


def summarise(case: str, name: str, measured: Measured, base: Measured) -> dict[str, Any]:
    cpu = ratios(measured.cpu, base.cpu)
    return {
        "model": case,
        "way": name,
        "wall_ms": statistics.median(measured.wall) * 1e3,
        "wall_ratio": ratios(measured.wall, base.wall),
        "cpu_ms": statistics.median(measured.cpu) * 1e3,
        "cpu_ratio": cpu,
        "added_cpu_us_per_rank": (cpu[0] - 1) * statistics.median(base.cpu) / WORLD_SIZE * 1e6,
        "collectives": measured.collectives,
        "added_collectives": measured.collectives - base.collectives,
        "by_kind": measured.kinds,
        "bytes": measured.nbytes,
        "added_bytes": measured.nbytes - base.nbytes,
    }


def row(entry: dict[str, Any]) -> list[str]:
    def spread(ratio: tuple[float, float, float]) -> str:
        return "1" if entry["way"] == "plain" else f"{ratio[0]:.3f} [{ratio[1]:.3f}, {ratio[2]:.3f}]"

    return [
        f"{entry['model']}: {entry['way']}",
        f"{entry['wall_ms']:.2f} ms",
        spread(entry["wall_ratio"]),
        f"{entry['cpu_ms']:.2f} ms",
        spread(entry["cpu_ratio"]),
        f"{entry['added_cpu_us_per_rank']:.0f} us",
        f"{entry['collectives']:.1f}",
        f"{entry['added_collectives']:+.1f}",
        f"{entry['bytes'] / 1024:.1f} KiB",
        f"{entry['added_bytes']:+.0f} B",
    ]


HEAD = ["", "step", "ratio", "CPU", "CPU ratio", "added CPU", "collectives", "added", "bytes", "added bytes"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # With the one that is not measured, five: each measured step begins a window of lookahead=4 as often as others.
    parser.add_argument("--steps", type=int, default=4, help="measured steps in a turn")
    parser.add_argument("--rounds", type=int, default=40, help="turns of each way in a launch")
    parser.add_argument("--launches", type=int, default=4, help="how often processes are started anew")
    parser.add_argument("--only", choices=list(CASES), action="append", help="this model only; may be given repeatedly")
    parser.add_argument("--way", choices=list(WAYS), action="append", help="this way, beside plain DDP; likewise")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    options = parser.parse_args()
    entries: list[dict[str, Any]] = []
    for case in options.only or list(CASES):
        wanted = ["plain", *(options.way or WAYS)]
        numbers = options.steps, options.rounds
        limit = 60 + 2.0 * options.rounds
        launches = [
            run_processes(WORLD_SIZE, measure, case, wanted, *numbers, launch, limit=limit)
            for launch in range(options.launches)
        ]
        ways = {
            name: together([[rank[name] for rank in ranks] for ranks in launches])
            for name in CASES[case][1]
            if name in wanted
        }
        entries += [summarise(case, name, measured, ways["plain"]) for name, measured in ways.items()]
    total = options.launches * options.rounds
    print(f"{WORLD_SIZE} gloo processes, {total} rounds of {options.steps} steps in {options.launches} launches\n")
    print(table(HEAD, [row(entry) for entry in entries]))
    save(options.json, steps=options.steps, rounds=total, launches=options.launches, results=entries)


if __name__ == "__main__":
    main()

"""What ``Join`` costs an active rank while inputs are even.

Two gloo processes train the same models in several ways: plain ``DistributedDataParallel``, inside torch's own
``torch.distributed.algorithms.join.Join``, inside ours, inside ours with ``divide_by_initial_world_size=False``, which
needs to know in each step how many ranks contribute, inside ours with ``steps=``, and over ``join.iterate`` with
``lookahead`` 1 and 4. Every way has its own modules and optimizers.

The ways take turns in blocks of ``--steps`` training steps, in an order that rotates, so that whatever else the machine
does hits all of them alike. A block's ratio is its time over that of plain DDP in the same round; the table gives
the median over ``--repeats`` rounds and, in brackets, the quartiles. Entering and leaving a context is not measured.
Plain DDP is there twice: what the second differs from the first is noise.

    step    wall time of a step, mean of the ranks: the only figure that shows waiting; noise on a shared machine
    CPU     processor time of a step, all threads of all ranks together: does not depend on who else computes
    added   what the median ratio of CPU time comes to in microseconds a step and rank

Collectives and their bytes are counted with ``torch.profiler``, in a block of its own, on rank 0: gloo records one
``gloo:*`` event for each operation, with shape and type. Bytes are those of the tensors, not of the wire.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, repeat
from typing import Any

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
COUNTED_STEPS = 10
_ITEM_BYTES = {"double": 8, "long int": 8, "float": 4, "int": 4, "unsigned char": 1, "bool": 1}

# -- what is trained --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """A training step and the objects that it trains."""

    step: Callable[[], None]
    modules: list[DDP]
    optimizers: list[torch.optim.Optimizer]


def supervised(model: nn.Module, inputs: torch.Tensor, *, zero: bool = False) -> Training:
    ddp = DDP(model)
    optimizer = sharded(ddp) if zero else torch.optim.SGD(ddp.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()

    return Training(step, [ddp], [optimizer])


def sharded(ddp: DDP) -> torch.optim.Optimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, from importing it
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=1e-3)


def small_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def mlp() -> Training:
    return supervised(small_mlp(), torch.randn(256, 128))


def cnn() -> Training:
    def block(before: int, after: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, stride, padding=1), nn.BatchNorm2d(after), nn.ReLU()]

    layers = [*block(3, 16, 1), *block(16, 32, 2), *block(32, 64, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return supervised(nn.Sequential(*layers, nn.Linear(64, 10)), torch.randn(8, 3, 32, 32))


def transformer() -> Training:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return supervised(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(1, 32, 256))


def mlp_zero() -> Training:
    return supervised(small_mlp(), torch.randn(256, 128), zero=True)


def gan() -> Training:
    """One update of the discriminator, one of the generator; the second runs backward through both."""
    generator = DDP(nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 128)))
    discriminator = DDP(nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 1)))
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
        numbers = join.iterate(range(steps + 2 * lookahead), lookahead=lookahead)
        yield numbers
        for _ in numbers:  # its end, which is not measured
            pass


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
CASES: dict[str, tuple[Callable[[], Training], list[str]]] = {
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
    """One way of training one model; seconds a step, one entry a round, and counts a step."""

    wall: list[float] = field(default_factory=list[float])
    cpu: list[float] = field(default_factory=list[float])
    collectives: float = 0.0
    nbytes: float = 0.0
    kinds: dict[str, float] = field(default_factory=dict[str, float])


def measure(steps: int, repeats: int, cases: list[str]) -> dict[str, dict[str, Measured]]:
    """On each rank: time and count every way of training every model."""
    results: dict[str, dict[str, Measured]] = {}
    for case in cases:
        build, names = CASES[case]
        trainings: dict[str, Training] = {}
        for name in names:
            torch.manual_seed(0)
            trainings[name] = build()
            for _ in range(WARM_UP_STEPS):
                trainings[name].step()
        results[case] = {name: Measured() for name in names}
        for turn in range(repeats):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                with block(trainings[name], WAYS[name], steps) as numbers:
                    wall, cpu = time_steps(trainings[name], numbers, steps)
                results[case][name].wall.append(wall)
                results[case][name].cpu.append(cpu)
        for name in names:
            with block(trainings[name], WAYS[name], COUNTED_STEPS) as numbers:
                count_collectives(trainings[name], numbers, results[case][name])
    return results


@contextlib.contextmanager
def block(training: Training, way: Way, steps: int) -> Iterator[Iterator[Any]]:
    """A context around a block of steps, entered, warm, and with all ranks at the same place."""
    settling = 5
    with warnings.catch_warnings(), way(training, settling + steps) as given:  # torch's Join rewrites the filters
        numbers = given if isinstance(given, Iterator) else repeat(0)
        for _ in islice(numbers, settling):
            training.step()
        dist.barrier()
        yield numbers


def time_steps(training: Training, numbers: Iterator[Any], steps: int) -> tuple[float, float]:
    """Seconds a step: wall time, mean of the ranks, and processor time, sum of the ranks."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in islice(numbers, steps):
        training.step()
    wall = time.perf_counter() - wall
    dist.barrier()  # what is still under way in gloo's threads belongs to these steps
    cpu = time.process_time() - cpu
    total = torch.tensor([wall / WORLD_SIZE, cpu], dtype=torch.float64) / steps
    dist.all_reduce(total)
    return total[0].item(), total[1].item()


def count_collectives(training: Training, numbers: Iterator[Any], measured: Measured) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True) as profile:
        for _ in islice(numbers, COUNTED_STEPS):
            training.step()
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


def ratios(values: list[float], base: list[float]) -> tuple[float, float, float]:
    """Median, lower and upper quartile of the ratios, round by round."""
    pairs = [value / reference for value, reference in zip(values, base, strict=True)]
    if len(pairs) < 2:
        return pairs[0], pairs[0], pairs[0]
    low, middle, high = statistics.quantiles(pairs, n=4, method="inclusive")
    return middle, low, high


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
    parser.add_argument("--steps", type=int, default=20, help="steps in a block")
    parser.add_argument("--repeats", type=int, default=24, help="rounds of blocks")
    parser.add_argument("--only", choices=list(CASES), action="append", help="this model only; may be given repeatedly")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    options = parser.parse_args()
    cases = options.only or list(CASES)
    results, *_ = run_processes(WORLD_SIZE, measure, options.steps, options.repeats, cases)
    entries = [
        summarise(case, name, measured, ways["plain"])
        for case, ways in results.items()
        for name, measured in ways.items()
    ]
    print(f"{WORLD_SIZE} gloo processes, {options.repeats} rounds of {options.steps} steps\n")
    print(table(HEAD, [row(entry) for entry in entries]))
    save(options.json, steps=options.steps, repeats=options.repeats, results=entries)


if __name__ == "__main__":
    main()

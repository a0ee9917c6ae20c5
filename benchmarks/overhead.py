"""Benchmark of the cost of ``Join`` for an active rank while inputs are even.

Two gloo processes train a model in these ways:

- plain ``DistributedDataParallel``;
- inside torch's own ``torch.distributed.algorithms.join.Join``;
- inside this library's ``Join``;
- the same with ``divide_by_initial_world_size=False``, which counts the ranks that contribute in each step;
- over ``join.iterate``, with ``lookahead`` 1 and 4;
- with weighted batches, in a plain block and over ``join.iterate``; each loss goes through ``join.scale``.

The ways take turns of a few steps, and each round draws a new order. So other load on the machine affects all of them
alike. All ways use the same modules and optimizers, because their place in memory makes a difference of a few percent.
Only torch's Join has modules of its own, because no other way can use a module after it.

A turn opens the way's context, and does not measure the first steps in it. Every other step is timed by itself. Each
launch of the processes takes the median over turns of the first step, of the second step, and so on, and then the mean
of these medians. So costs that occur now and then do not count, and costs that occur every few steps do. The table has
the mean, over the launches, of the ratio to plain DDP and, behind it, twice its standard error. Plain DDP is measured
twice; the difference of the two is noise.

    step    wall time of a step, mean of the ranks: the only figure that includes waiting; noisy on a shared machine
    CPU     processor time of a step, all threads of all ranks together: depends less on other load
    main    processor time added to a rank's main thread, in microseconds a step: the whole cost of our Python, even if
            the rank would wait for others anyway. Each part of a step is measured by itself, so the noise of one part
            does not hide the cost in another: the figure with the least noise

Collectives and their bytes are counted with ``torch.profiler``, in a turn of its own, on rank 0: gloo records one
``gloo:*`` event for each operation, with shape and type. The bytes are the tensors' bytes, not the bytes on the wire.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from common import run_processes, save, table
from tensors import ManyTensors
from torch import nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.algorithms.join import Joinable as TorchJoinable
from torch.nn.parallel import DistributedDataParallel as DDP

from join import Join

WORLD_SIZE = 2
WARM_UP_STEPS = 3  # DDP rebuilds its buckets after the first
COUNTED_STEPS = 4  # a window of lookahead=4; more events of 5,000 parameters take minutes
WEIGHTS = (200.0, 256.0)  # of ranks 0 and 1; unequal, so that gradients are multiplied after the reduction
SETTLING_STEPS = 3  # of a turn; in the first two, ranks exchange additional messages
_ITEM_BYTES = {"double": 8, "long int": 8, "float": 4, "int": 4, "unsigned char": 1, "bool": 1}

# -- what is trained --------------------------------------------------------------------------------------------------


Parts: TypeAlias = list[Callable[[], object]]


def as_it_is(loss: torch.Tensor) -> torch.Tensor:
    return loss


@dataclass
class Training:
    """A training step, in parts that are timed by themselves, and the objects that it trains."""

    parts: Parts
    modules: list[DDP]
    optimizers: list[torch.optim.Optimizer]
    scale: Callable[[torch.Tensor], torch.Tensor] = as_it_is
    """Function that is applied to a loss before its backward."""


def sgd(ddp: DDP) -> torch.optim.Optimizer:
    return torch.optim.SGD(ddp.parameters(), lr=1e-3, momentum=0.9)


def sharded(ddp: DDP) -> torch.optim.Optimizer:
    from joinables.zero import ZeroRedundancyOptimizer  # torch's own, without the notices of its import

    return ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=1e-3)


def supervised(
    model: nn.Module, inputs: torch.Tensor, optimizer_of: Callable[[DDP], torch.optim.Optimizer] = sgd
) -> Training:
    ddp = DDP(model)
    optimizer = optimizer_of(ddp)
    outputs: list[torch.Tensor] = []

    def forward() -> None:
        outputs.append(ddp(inputs))

    def backward() -> None:
        training.scale(outputs.pop().square().mean()).backward()

    training = Training([optimizer.zero_grad, forward, backward, optimizer.step], [ddp], [optimizer])
    return training


def mlp(optimizer_of: Callable[[DDP], torch.optim.Optimizer] = sgd) -> Training:
    layers = [nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    return supervised(nn.Sequential(*layers), torch.randn(256, 128), optimizer_of)


def cnn() -> Training:
    def block(before: int, after: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, stride, padding=1), nn.BatchNorm2d(after), nn.ReLU()]

    layers = [*block(3, 16, 1), *block(16, 32, 2), *block(32, 64, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return supervised(nn.Sequential(*layers, nn.Linear(64, 10)), torch.randn(8, 3, 32, 32))


def transformer() -> Training:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return supervised(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(1, 32, 256))


def gan(*, norms: bool = False) -> Training:
    """Return a training of two updates: the discriminator's, and the generator's, whose backward goes through both."""
    norm = [nn.BatchNorm1d(256)] if norms else []
    generator = DDP(nn.Sequential(nn.Linear(32, 256), *norm, nn.ReLU(), nn.Linear(256, 128)))
    discriminator = DDP(nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 1)))
    update_g, update_d = sgd(generator), sgd(discriminator)
    noise, real = torch.randn(256, 32), torch.randn(256, 128)
    outputs: list[torch.Tensor] = []

    def without_grad() -> None:
        with torch.no_grad():
            outputs.append(generator(noise))

    def discriminate() -> None:
        outputs.append(discriminator(torch.cat([real, outputs.pop()])))

    def backward_d() -> None:
        scores = outputs.pop()
        (scores[256:] - scores[:256]).mean().backward()

    def generate() -> None:
        outputs.append(generator(noise))

    def judge() -> None:
        outputs.append(discriminator(outputs.pop()))

    def backward_g() -> None:
        outputs.pop().mean().neg().backward()

    first = [update_d.zero_grad, without_grad, discriminate, backward_d, update_d.step]
    second = [update_g.zero_grad, generate, judge, backward_g, update_g.step]
    return Training([*first, *second], [generator, discriminator], [update_g, update_d])


def many_tensors(count: int) -> Training:
    return supervised(ManyTensors(count), torch.ones(2, 4))


def plain(training: Training, steps: int) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


def torch_join(training: Training, steps: int) -> contextlib.AbstractContextManager[Any]:
    sharded_ones = [optimizer for optimizer in training.optimizers if isinstance(optimizer, TorchJoinable)]
    return TorchJoin([*training.modules, *sharded_ones])


def our_join(training: Training, _: int, **arguments: Any) -> Join:
    return Join([*training.modules, *training.optimizers], **arguments)


@contextlib.contextmanager
def weighted(training: Training, steps: int) -> Iterator[None]:
    with our_join(training, steps) as join:
        join.weight = WEIGHTS[dist.get_rank()]
        with scaling(training, join):
            yield


def weigh(_: int) -> float:
    return WEIGHTS[dist.get_rank()]


@contextlib.contextmanager
def lockstep(training: Training, steps: int, lookahead: int = 1, weighs: bool = False) -> Iterator[Iterator[int]]:
    with our_join(training, steps) as join:
        numbers = iter(join.iterate(range(steps), lookahead=lookahead, weigh=weigh if weighs else None))
        with scaling(training, join) if weighs else contextlib.nullcontext():
            yield numbers
            assert next(numbers, None) is None  # its end, which is not measured


@contextlib.contextmanager
def scaling(training: Training, join: Join) -> Iterator[None]:
    training.scale = join.scale
    try:
        yield
    finally:
        training.scale = as_it_is


Way = Callable[[Training, int], contextlib.AbstractContextManager[Any]]
"""Context for a block of a number of steps; it may yield an iterator, which is advanced before each step."""
TORCH_JOIN = "torch's Join"
WAYS: dict[str, Way] = {
    "plain": plain,
    "plain, again": plain,
    TORCH_JOIN: torch_join,
    "Join": our_join,
    "Join, mean over contributors": partial(our_join, divide_by_initial_world_size=False),
    "Join, weighted": weighted,
    "join.iterate": lockstep,
    "join.iterate, lookahead=4": partial(lockstep, lookahead=4),
    "join.iterate, weighted": partial(lockstep, weighs=True),
}
CASES: dict[str, tuple[Callable[[], Training], list[str]]] = {
    "MLP": (mlp, list(WAYS)),
    "CNN with BatchNorm": (cnn, list(WAYS)),
    "transformer": (transformer, list(WAYS)),
    "MLP with ZeRO": (partial(mlp, sharded), list(WAYS)),
    # torch's Join hangs on it as soon as inputs are uneven
    "300 parameters": (partial(many_tensors, 300), ["plain", "plain, again", "Join", "join.iterate"]),
    "5000 parameters": (partial(many_tensors, 5000), ["plain", "plain, again", "Join", "join.iterate"]),
    "GAN": (gan, ["plain", "plain, again", "Join", "join.iterate", "join.iterate, lookahead=4"]),
}

# -- measuring --------------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """One way of training one model on one rank; seconds of each step, turn by turn, and counts a step."""

    wall: list[float] = field(default_factory=list[float])
    cpu: list[float] = field(default_factory=list[float])
    main: list[list[float]] = field(default_factory=list[list[float]])
    """Processor time of the main thread in each part of a step."""
    collectives: float = 0.0
    nbytes: float = 0.0
    kinds: dict[str, float] = field(default_factory=dict[str, float])


def measure(case: str, ways: list[str], steps: int, rounds: int, launch: int) -> dict[str, Measured]:
    """Time the given ways of training a model on each rank, and count collectives; skip ways that cannot train it."""
    build, possible = CASES[case]
    names = [name for name in possible if name in ways]
    results = {name: Measured() for name in names}
    with trainings_of(build, names) as trainings:
        for name in turns(names, rounds, launch):
            with opened(trainings[name], WAYS[name], steps) as parts:
                time_steps(parts, steps, results[name])
        for name in names:
            with opened(trainings[name], WAYS[name], COUNTED_STEPS) as parts:
                count_collectives(parts, results[name])
    return results


@contextlib.contextmanager
def trainings_of(build: Callable[[], Training], ways: list[str]) -> Iterator[dict[str, Training]]:
    """Yield the training of each way, warmed up."""
    with warnings.catch_warnings():  # torch's Join rewrites the filters
        trainings = dict.fromkeys(ways, warm(build))
        if TORCH_JOIN in ways:  # it does not restore its modules
            trainings[TORCH_JOIN] = warm(build)
        yield trainings


def turns(ways: list[str], rounds: int, seed: int) -> Iterator[str]:
    """Yield the way of each turn: each way once a round, in the same order on all ranks."""
    draw = random.Random(seed)
    for _ in range(rounds):
        yield from draw.sample(ways, len(ways))


def warm(build: Callable[[], Training]) -> Training:
    torch.manual_seed(0)
    training = build()
    take(training.parts, WARM_UP_STEPS)
    return training


@contextlib.contextmanager
def opened(training: Training, way: Way, steps: int) -> Iterator[Parts]:
    """Open a turn of a way, run its first steps, and yield the parts of a step; ``steps`` more steps fit in the turn.

    In the first part, ``join.iterate`` yields a batch; in other ways this part does nothing.
    """
    with way(training, SETTLING_STEPS + steps) as given:
        parts: Parts = [partial(next, given) if isinstance(given, Iterator) else int, *training.parts]
        take(parts, SETTLING_STEPS)
        yield parts


def take(parts: Parts, steps: int) -> None:
    for _ in range(steps):
        for part in parts:
            part()


def time_steps(parts: Parts, steps: int, measured: Measured) -> None:
    on_gpu = torch.get_default_device().type == "cuda"
    for _ in range(steps):
        cpu, wall, main = time.process_time(), time.perf_counter(), [time.thread_time()]
        for part in parts:
            part()
            main.append(time.thread_time())
        if on_gpu:
            torch.cuda.synchronize()
        measured.wall.append(time.perf_counter() - wall)
        measured.cpu.append(time.process_time() - cpu)
        measured.main.append([after - before for before, after in pairwise(main)])


def count_collectives(parts: Parts, measured: Measured) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True) as profile:
        take(parts, COUNTED_STEPS)
        dist.barrier()
    kinds: Counter[str] = Counter()
    for event in profile.profiler.kineto_results.events():
        kind = event.name().removeprefix(f"{dist.get_backend()}:")
        if kind == event.name() or kind == "barrier":
            continue
        kinds[kind] += 1
        for shape, item in zip(event.shapes(), event.dtypes(), strict=True):
            measured.nbytes += torch.Size(shape).numel() * _ITEM_BYTES[item] / COUNTED_STEPS
    measured.kinds = {kind: number / COUNTED_STEPS for kind, number in sorted(kinds.items())}
    measured.collectives = kinds.total() / COUNTED_STEPS


# -- reporting --------------------------------------------------------------------------------------------------------


Estimate: TypeAlias = tuple[float, float]
"""Mean over launches and its standard error, which is NaN for one launch."""


@dataclass(frozen=True)
class Typical:
    """A typical step of one way in one launch, in seconds."""

    wall: float
    cpu: float
    main: float


def typical(ranks: list[Measured], steps: int) -> Typical:
    """Return the ranks' mean of wall time and of the main thread's time, and their sum of processor time."""
    parts = zip(*[zip(*rank.main, strict=True) for rank in ranks], strict=True)
    return Typical(
        wall=of_turns((rank.wall for rank in ranks), steps),
        cpu=of_turns((rank.cpu for rank in ranks), steps) * len(ranks),
        main=sum(of_turns(by_rank, steps) for by_rank in parts),
    )


def of_turns(by_rank: Iterable[Sequence[float]], steps: int) -> float:
    """Return the mean, over the steps of a turn, of each step's median over turns, for the mean of all ranks."""
    means = [statistics.fmean(each) for each in zip(*by_rank, strict=True)]
    return statistics.fmean(statistics.median(means[step::steps]) for step in range(steps))


def estimate(launches: Iterable[float]) -> Estimate:
    values = list(launches)
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def summarise(case: str, launches: list[list[dict[str, Measured]]], steps: int) -> list[dict[str, Any]]:
    """Return one entry for each way; ``launches`` holds the measurements of each rank in each launch."""
    first = launches[0][0]
    times = {name: [typical([rank[name] for rank in ranks], steps) for ranks in launches] for name in first}
    entries: list[dict[str, Any]] = []
    for name, measured in first.items():
        pairs = list(zip(times[name], times["plain"], strict=True))
        entries.append(
            {
                "model": case,
                "way": name,
                "wall_ms": statistics.fmean(each.wall for each in times[name]) * 1e3,
                "wall_ratio": estimate(way.wall / base.wall for way, base in pairs),
                "cpu_ms": statistics.fmean(each.cpu for each in times[name]) * 1e3,
                "cpu_ratio": estimate(way.cpu / base.cpu for way, base in pairs),
                "main_us": estimate((way.main - base.main) * 1e6 for way, base in pairs),
                "collectives": measured.collectives,
                "added_collectives": measured.collectives - first["plain"].collectives,
                "by_kind": measured.kinds,
                "bytes": measured.nbytes,
                "added_bytes": measured.nbytes - first["plain"].nbytes,
            }
        )
    return entries


def row(entry: dict[str, Any]) -> list[str]:
    def spread(name: str, form: str, without: str) -> str:
        mean, error = entry[name]
        return without if entry["way"] == "plain" else f"{mean:{form}} ± {2 * error:{form}}"

    return [
        f"{entry['model']}: {entry['way']}",
        f"{entry['wall_ms']:.2f} ms",
        spread("wall_ratio", ".3f", "1"),
        f"{entry['cpu_ms']:.2f} ms",
        spread("cpu_ratio", ".3f", "1"),
        spread("main_us", ".0f", "0"),
        f"{entry['collectives']:.1f}",
        f"{entry['added_collectives']:+.1f}",
        f"{entry['bytes'] / 1024:.1f} KiB",
        f"{entry['added_bytes']:+.0f} B",
    ]


HEAD = ["", "step", "ratio", "CPU", "CPU ratio", "main, us", "collectives", "added", "bytes", "added bytes"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # A multiple of 4, so that a window of lookahead=4 begins in them as often as elsewhere.
    parser.add_argument("--steps", type=int, default=8, help="measured steps in a turn")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each way in a launch")
    parser.add_argument("--launches", type=int, default=8, help="how often the processes are started")
    parser.add_argument("--only", choices=list(CASES), action="append", help="this model only; can be repeated")
    parser.add_argument("--way", choices=list(WAYS), action="append", help="this way and plain DDP; can be repeated")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: over NCCL; one GPU is enough")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    options = parser.parse_args()
    total = options.launches * options.rounds
    where, rounds = f"{WORLD_SIZE} processes on {options.device}", f"{total} rounds of {options.steps} steps"
    print(f"{where}, {rounds} in {options.launches} launches")
    entries: list[dict[str, Any]] = []
    for case in options.only or list(CASES):
        wanted = ["plain", *(options.way or WAYS)]
        numbers = options.steps, options.rounds
        limit = 600 + 60.0 * options.rounds  # a round of 5,000 parameters takes half a minute
        launches = [
            run_processes(WORLD_SIZE, measure, case, wanted, *numbers, launch, device=options.device, limit=limit)
            for launch in range(options.launches)
        ]
        of_case = summarise(case, launches, options.steps)
        entries += of_case
        print("\n" + table(HEAD, [row(entry) for entry in of_case]), flush=True)
    save(options.json, steps=options.steps, rounds=total, launches=options.launches, results=entries)


if __name__ == "__main__":
    main()

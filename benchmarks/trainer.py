"""Benchmark of the trainer: a step, beside a hand-written DDP loop; start and end, beside torch's spawn.

step       2 gloo processes; ``fit`` and a hand-written loop take turns on the same module and data. Wall time and
           processor time of a step, between the ends of the first and the last step of an epoch. Ratios are medians
           over the rounds, with quartiles in brackets. Inputs are even, so ``fit`` sends the same messages as DDP
start      ``fit`` with an empty loop, beside ``torch.multiprocessing.spawn`` of an empty function, 2 processes
way home   from the end of training in the workers to the end of ``fit``, with a large module, beside writing its
           weights to a file and reading them, once
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import run_processes, save, table
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from joinables.trainer import Callback, DDPStrategy, Trainer, TrainModule
from joinables.trainer.checkpoint import read_checkpoint, write_checkpoint

WORLD_SIZE, BATCH, WIDTH = 2, 64, 384


class Perceptron(TrainModule):
    """A module whose step takes a few milliseconds."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.body(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class Stopwatch:
    """Clock from the end of the first step to the end of the last."""

    def __init__(self) -> None:
        self.steps, self.started, self.ended = 0, (0.0, 0.0), (0.0, 0.0)

    def tick(self) -> None:
        now = time.perf_counter(), time.process_time()
        self.started, self.ended = now if self.steps == 0 else self.started, now
        self.steps += 1

    def per_step(self) -> tuple[float, float]:
        wall, cpu = (end - start for end, start in zip(self.ended, self.started, strict=True))
        return wall / (self.steps - 1), cpu / (self.steps - 1)


class Ticks(Callback):
    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.watch.tick()


class EndOfTraining(Callback):
    """Returns the time at which training ended."""

    def __init__(self) -> None:
        self.at = 0.0

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.at = time.time()

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]


class InPlace(DDPStrategy):
    """Runs in the present process group, and starts no processes."""

    def launch(self, world_size: int, accelerator: str, fn: Callable[..., Any], *args: Any) -> Any:
        return fn(*args)


def data(steps: int) -> DataLoader[Any]:
    samples = WORLD_SIZE * BATCH * steps
    return DataLoader(TensorDataset(torch.randn(samples, 64), torch.randint(10, (samples,))), BATCH)


def by_hand(loader: Any) -> tuple[float, float]:
    watch = Stopwatch()
    module = Perceptron()
    ddp = DistributedDataParallel(module.body)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3, momentum=0.9)
    shard = torch.utils.data.DistributedSampler(loader.dataset, shuffle=False)
    for x, y in DataLoader(loader.dataset, BATCH, sampler=shard):
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()
        watch.tick()
    return watch.per_step()


def by_trainer(loader: Any) -> tuple[float, float]:
    watch = Stopwatch()
    Trainer(devices=WORLD_SIZE, strategy=InPlace(), callbacks=Ticks(watch), logger=False).fit(Perceptron(), loader)
    return watch.per_step()


def steps(count: int, repeats: int) -> dict[str, list[tuple[float, float]]]:
    ways = {"by hand": by_hand, "by hand again": by_hand, "Trainer": by_trainer}
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    loader = data(count)
    for _ in range(repeats):
        for name, way in ways.items():
            dist.barrier()
            measured[name].append(way(loader))
    return measured


def nothing(rank: int) -> None:
    """Do nothing, as an empty worker."""


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def fit_nothing(width: int) -> tuple[float, float]:
    """Return the time of a fit without steps, and the time from the end of its training."""
    end = EndOfTraining()
    trainer = Trainer(devices=WORLD_SIZE, max_epochs=0, callbacks=end, logger=False)
    module, empty = Perceptron(width), data(0)
    whole = timed(lambda: trainer.fit(module, empty))
    return whole, time.time() - end.at


def file_once(width: int) -> float:
    state = Perceptron(width).state_dict()

    def once() -> None:
        write_checkpoint(state, Path(folder, "weights"))
        for value in read_checkpoint(Path(folder, "weights")).values():
            value.clone()

    with tempfile.TemporaryDirectory() as folder:
        return timed(once)


def spread(values: list[float], form: str) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:{form}} [{low:{form}}, {high:{form}}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="steps of an epoch")
    parser.add_argument("--repeats", type=int, default=40, help="rounds of epochs")
    parser.add_argument("--starts", type=int, default=3, help="rounds of starts")
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the large module")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    options = parser.parse_args()

    measured = run_processes(WORLD_SIZE, steps, options.steps, options.repeats)[0]
    plain = measured["by hand"]
    rows = [
        (
            name,
            f"{1000 * statistics.median(wall for wall, _ in times):.2f} ms",
            spread([wall / base for (wall, _), (base, _) in zip(times, plain, strict=True)], ".3f"),
            spread([cpu / base for (_, cpu), (_, base) in zip(times, plain, strict=True)], ".3f"),
        )
        for name, times in measured.items()
    ]
    print(table(("step", "time", "ratio", "CPU ratio"), rows))

    large = round((options.megabytes * 1e6 / 4) ** 0.5)
    names = ("spawn of an empty function", "fit, empty loop", "its way home", "way home, large module", "file, once")
    starts: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(options.starts):
        starts[names[0]].append(timed(lambda: mp.spawn(nothing, nprocs=WORLD_SIZE)))
        for name, seconds in zip(names[1:3], fit_nothing(8), strict=True):
            starts[name].append(seconds)
        starts[names[3]].append(fit_nothing(large)[1])
        starts[names[4]].append(file_once(large))
    medians = {name: statistics.median(times) for name, times in starts.items()}
    print(f"\nlarge module: {options.megabytes} MB")
    print(table(("start", "time"), [(name, f"{seconds:.2f} s") for name, seconds in medians.items()]))
    print(f"\nway home: {medians[names[3]] / medians[names[4]]:.2f} x writing and reading the file")
    save(options.json, steps=measured, starts=starts)


if __name__ == "__main__":
    main()

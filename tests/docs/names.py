"""What the names of an example stand for, and runs of it on two uneven ranks and in a single process."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, default_collate

import joinables.testing
import joinables.trainer
from joinables import Join, JoinReport
from recipes import contrastive
from tests.examples import needed
from tests.harness import Pool
from tests.training import FEATURES, TARGETS, TOLERANCE, assert_same, batch, flat_state, whole
from tests.versions import OWN_BUFFERS

KINDS = {"map": (0, 3), "stream": (5, 2)}
"""The loaders with which an example runs, and the numbers of batches of the two ranks."""
SHORT = 3
"""The number of samples in the last batch of a rank, in examples that weigh batches."""


class Net(nn.Module):
    """Two layers. It notes the samples that it is trained on, without those of dummies."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, TARGETS)])
        self.seen: list[list[float]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not (Join.is_open_on(None) and Join.current().shadowing):
            self.seen += x.tolist()
        return self.layers[1](torch.tanh(self.layers[0](x)))

    @property
    def router(self) -> nn.Module:
        return self.layers

    def loss(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])


class MeanSquare(nn.Module):
    def forward(self, output: torch.Tensor) -> torch.Tensor:
        return output.square().mean()


class Stream(IterableDataset[Any]):
    """Batches without a length."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return map(default_collate, self.batches)


class Stateful:
    """A loader with a state, as torchdata's has."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader, self.at = loader, 0

    def __iter__(self) -> Iterator[Any]:
        for item in islice(self.loader, self.at, None):
            self.at += 1
            yield item

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Engine:
    """Averages gradients itself, and steps after every ``k`` backwards."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, k: int) -> None:
        self.model, self.optimizer, self.k, self.backwards = module, optimizer, k, 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.k).backward()
        self.backwards += 1

    def step(self) -> None:
        if self.backwards % self.k == 0:
            average_gradients(self.model)
            self.optimizer.step()
            self.optimizer.zero_grad()


def average_gradients(module: nn.Module) -> None:
    sum_over_ranks(module)
    for parameter in module.parameters():
        parameter.grad = parameter.grad / dist.get_world_size()  # pyright: ignore[reportOptionalOperand]


def sum_over_ranks(module: nn.Module) -> None:
    for parameter in module.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)


class Names:
    """The names that an example uses and does not define. What they stand for is made when it is needed.

    Args:
        code: The example.
        kind: The kind of its loader.
        **given: Names that stand for something else in a test.
    """

    torch, dist, joinables = torch, dist, joinables
    DistributedDataParallel = DistributedDataParallel
    epochs, k, n, device, accuracy = 2, 2, 2, "cpu", 0.5
    average_gradients, sum_over_ranks = staticmethod(average_gradients), staticmethod(sum_over_ranks)
    tokens = staticmethod(len)

    def __init__(self, code: str, kind: str, **given: Any) -> None:
        self.code, self.kind = code.replace("broadcast_buffers", next(iter(OWN_BUFFERS))), kind
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.total, self.count, self.losses, self.printed = 0.0, 0, list[float](), list[Any]()
        self.names: dict[str, Any] = {"print": self.print, "__name__": "example", **given}
        for name in sorted(needed(code) - given.keys()):
            self.names[name] = self.meaning_of(name)

    def meaning_of(self, name: str) -> Any:
        for place in (self, joinables, joinables.testing, joinables.trainer, contextlib, contrastive):
            if hasattr(place, name):
                return getattr(place, name)
        raise AssertionError(f"{name} is not defined. Define it in the example, or in tests/docs/names.py.")

    def print(self, *values: Any) -> None:
        self.printed += [value for value in values if not isinstance(value, JoinReport)]

    # -- modules ------------------------------------------------------------------------------------------------------

    @cached_property
    def net(self) -> Net:
        return Net()

    @property
    def module(self) -> Net:
        return self.net

    @cached_property
    def ema(self) -> Net:
        return Net()

    @cached_property
    def model(self) -> nn.Module:
        if "Join([]" in self.code or "DistributedDataParallel(model)" in self.code:
            return self.net
        returns_loss = "scale(model(" in self.code
        return DistributedDataParallel(nn.Sequential(self.net, MeanSquare()) if returns_loss else self.net)

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        if "ZeroStep" in self.code or "zero]" in self.code:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            return ZeroRedundancyOptimizer(self.net.parameters(), torch.optim.Adam)
        return torch.optim.Adam(self.net.parameters(), lr=0.01)

    @property
    def zero(self) -> torch.optim.Optimizer:
        return self.optimizer

    @cached_property
    def scheduler(self) -> Any:
        return torch.optim.lr_scheduler.StepLR(self.optimizer, 1)

    @cached_property
    def scaler(self) -> Any:
        return torch.amp.GradScaler("cpu", init_scale=8.0)

    @cached_property
    def engine(self) -> Engine:
        return Engine(self.net, self.optimizer, self.k if "loss_divided_by=k" in self.code else 1)

    @cached_property
    def metric(self) -> Any:
        from torchmetrics import MeanSquaredError

        return MeanSquaredError()

    @property
    def meter(self) -> Any:
        return SimpleNamespace(update=self.print)

    @cached_property
    def join(self) -> Join:
        """The block around an example that is a part of one."""
        return Join([self.model, self.optimizer], divide_by_initial_world_size=False)

    # -- data ---------------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> Iterable[int]:
        """The ranks whose data this process trains on: its own, or in a single process all of them."""
        return [self.rank] if self.world_size > 1 else range(len(KINDS[self.kind]))

    def samples_of(self, rank: int, step: int) -> list[Any]:
        """The samples that a rank has at a step, as this example reads them."""
        count, loops = KINDS[self.kind][rank], self.code.count("iterate(")
        weighs = "join.weight =" in self.code or 0 < loops <= self.code.count("weigh=")
        if step >= count:
            return []
        x, y = batch(rank, 0, step)
        pairs = list(zip(x, y, strict=True))[: SHORT if weighs and step + 1 == count else None]
        if re.search(r"weigh=(len|tokens)\b|for x in (join.iterate\()?loader", self.code):
            return [x for x, _ in pairs]
        return [(x, int(y[0] > 0)) for x, y in pairs] if "argmax" in self.code else pairs

    @cached_property
    def loader(self) -> Any:
        steps = range(max(KINDS[self.kind]))
        of_step = ([each for rank in self.ranks for each in self.samples_of(rank, step)] for step in steps)
        batches = [samples for samples in of_step if samples]
        if self.kind == "stream":
            loader = DataLoader(Stream(batches), batch_size=None)
        else:
            dataset: Any = [each for samples in batches for each in samples]
            numbers = iter(range(len(dataset)))
            loader = DataLoader(dataset, batch_sampler=[list(islice(numbers, len(samples))) for samples in batches])
        return Stateful(loader) if "load_state_dict" in self.code else loader

    @property
    def batches(self) -> Any:
        return self.loader

    @cached_property
    def validation(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [batch(rank, 1, 0) for rank in self.ranks for _ in range(1 + rank)]

    # -- functions ----------------------------------------------------------------------------------------------------

    def schedule(self, step: int) -> float:
        return 0.1 / (1 + step)

    def loss_fn(self, output: torch.Tensor, target: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        if target is None:
            return MeanSquare()(output)
        loss_fn = nn.functional.mse_loss if target.is_floating_point() else nn.functional.cross_entropy
        return loss_fn(output, target, **options)

    def mean_loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return self.loss_fn(model(batch))

    def sums_of(self, model: nn.Module, loader: Iterable[Any]) -> torch.Tensor:
        return sum((model(x).detach().sum(0) for x, _ in loader), torch.zeros(TARGETS))

    def train_step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss_fn(self.names.get("model", self.model)(x), y)
        Join.current().scale(loss).backward()
        self.optimizer.step()
        return loss

    @property
    def step(self) -> Callable[..., Any]:
        return self.train_step

    def train(self, *data: Any) -> None:
        """Train on all batches, on a batch, or on ``x`` and ``y``, after the model or without it."""
        for x, y in [data[-2:]] if len(data) > 1 else data or self.loader:
            self.train_step(x, y)

    def evaluate(self) -> None:
        with torch.no_grad():
            self.print(self.net(torch.ones(1, FEATURES)))

    # -- a run --------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run the example, in a ``Join`` block if it is a part of one."""
        with self.join if "join" in self.names else contextlib.nullcontext():
            exec(compile(self.code, "example", "exec"), self.names)

    def trace(self) -> Trace:
        """Run the example, and return what it leaves."""
        self.run()
        found = {name: value for name, value in self.names.items() if not name.startswith("_")}
        state = {name: state for name, value in found.items() if (state := state_of(value)) is not None}
        logs = {name: found[name] for name in LOGS if isinstance(found.get(name), (torch.Tensor, dict, list, int))}
        sums = {name: found[name] for name in SUMS if isinstance(found.get(name), (int, float))}
        ends = flat_state(whole(self.net.state_dict()))
        moved = any(not torch.equal(ends[path], start) for path, start in flat_state(Net().state_dict()).items())
        return Trace(flat_state(whole(state)), flat_state(logs), sums, flat_state(self.printed), self.net.seen, moved)


LOGS = "logged", "logs", "losses", "mean_loss", "steps", "sums"
"""Names of examples for what is the same on all ranks."""
SUMS = "count", "total"
"""Names of examples for numbers of a rank, whose sum over the ranks is that of a single process."""


@dataclass(frozen=True)
class Trace:
    """What a run of a block on a rank leaves.

    Attributes:
        state: that of all modules and optimizers.
        logs: what the block says is the same on all ranks.
        sums: numbers of this rank, which add up to those of a single process.
        printed: all that the block prints, but reports.
        seen: the samples that the module was trained on.
        moved: whether the module has trained.
    """

    state: dict[str, torch.Tensor]
    logs: dict[str, torch.Tensor]
    sums: dict[str, float]
    printed: dict[str, torch.Tensor]
    seen: list[list[float]]
    moved: bool


def state_of(value: Any) -> Any:
    """The state of a module, or of an optimizer that does not shard."""
    if isinstance(value, (nn.Module, torch.optim.Optimizer)) and not hasattr(value, "consolidate_state_dict"):
        return value.state_dict()
    return None


def follow(rank: int, code: str, names: type[Names], kinds: Iterable[str]) -> list[Trace]:
    """Run a block with each kind of loader, in a folder of its own."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            return [names(code, kind).trace() for kind in kinds]
        finally:
            os.chdir(before)


def check(pool: Pool, code: str, names: type[Names] = Names) -> None:
    """Run a block on two uneven ranks and in a single process, and compare what the runs leave."""
    kinds = ["map"] if "steps(loader)" in code else list(KINDS)  # which needs a length
    by_rank = pool.run(follow, code, names, kinds, ranks=2)
    (alone,) = pool.run(follow, code, names, kinds, ranks=1)
    for kind, expected, *traces in zip(kinds, alone, *by_rank, strict=True):
        for trace in traces:
            assert_same(trace.state, expected.state, TOLERANCE)
            assert_same(trace.logs, expected.logs, TOLERANCE)
            if trace.printed or trace is traces[0]:  # often only rank 0 prints
                assert_same(trace.printed, expected.printed, TOLERANCE)
            assert trace.moved == bool(re.search(r"\b(step|train|train_step)[()]", code)), kind
        assert sorted(chain.from_iterable(trace.seen for trace in traces)) == sorted(expected.seen), kind
        assert {name: sum(trace.sums[name] for trace in traces) for name in expected.sums} == pytest.approx(
            expected.sums
        )

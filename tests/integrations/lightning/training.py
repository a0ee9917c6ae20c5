"""A small module in Lightning's Trainer on uneven ranks, and the same trained in one process by hand."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl  # pyright: ignore[reportMissingImports]
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from joinables.integrations.lightning import JoinStrategy

FEATURES = 4


def batch(rank: int, step: int, epoch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank has at a step: batches are of several sizes."""
    generator = torch.Generator().manual_seed(1 + rank + 10 * step + 1000 * epoch)
    x = torch.randn(2 + (2 * rank + step) % 3, FEATURES, generator=generator)
    return x, x.sin().sum(1, keepdim=True) + torch.randn(len(x), 1, generator=generator)


class Stream(IterableDataset[Any]):
    """Batches that nobody knows the number of; other ones in each epoch."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count, self.epoch = rank, count, 0

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        yield from (batch(self.rank, step, epoch) for step in range(self.count))


class Sized:
    """The same with a length."""

    def __init__(self, rank: int, count: int) -> None:
        self._stream = Stream(rank, count)

    def __len__(self) -> int:
        return self._stream.count

    def __iter__(self) -> Iterator[Any]:
        return iter(self._stream)


def loader_of(kind: str, rank: int, count: int) -> Any:
    """A loader of one rank."""
    if kind == "sized":
        return Sized(rank, count)
    return DataLoader(Stream(rank, count), batch_size=None)


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    counts: tuple[int, int] = (5, 2)
    kind: str = "stream"
    weigh: Any = "samples"
    epochs: int = 2
    accumulate: int = 1
    scheduler: str = "step"
    clip: float | None = None
    max_steps: int = -1
    limit: int | None = None
    norm: bool = False
    val_counts: tuple[int, int] | None = None
    validate_every: int | None = None
    lost: int = 0  # of the first window: the batches whose gradients a checkpoint does not have


def build(case: Case) -> nn.Sequential:
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(8)] if case.norm else []
    return nn.Sequential(nn.Linear(FEATURES, 8, bias=not case.norm), *norm, nn.Tanh(), nn.Linear(8, 1))


def optimizers_of(net: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)


class Module(pl.LightningModule):
    """Trains a net; keeps what happens."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.net, self.case = build(case), case
        self.seen: list[int] = []

    def training_step(self, data: Any, index: int) -> torch.Tensor:
        x, y = data
        self.seen.append(len(x))
        return nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, data: Any, index: int, dataloader_idx: int = 0) -> None:
        x, y = data
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y), sync_dist=True, batch_size=len(x))

    def configure_optimizers(self) -> Any:
        optimizer, scheduler = optimizers_of(self.net)
        return [optimizer], [{"scheduler": scheduler, "interval": self.case.scheduler}]

    def state(self) -> list[torch.Tensor]:
        """All that is trained, and the optimizer's state."""
        return [*flat(self.net, self.trainer.optimizers[0])]


def flat(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [each for state in optimizer.state.values() for each in state.values()]
    rate = torch.tensor(optimizer.param_groups[0]["lr"])
    return [each.detach().clone() for each in (*net.parameters(), *net.buffers(), *moments, rate)]


def quiet(rank: int) -> None:
    """As Lightning's launcher would set a rank up; the process group is there."""
    os.environ["LOCAL_RANK"] = str(rank)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning|torch")
    torch.set_num_threads(1)


def trainer_of(case: Case, **options: Any) -> pl.Trainer:
    """A trainer of two ranks."""
    chosen: dict[str, Any] = {
        "strategy": JoinStrategy(weigh=case.weigh),
        "accelerator": "cpu",
        "devices": 2,
        "max_epochs": case.epochs,
        "max_steps": case.max_steps,
        "accumulate_grad_batches": case.accumulate,
        "gradient_clip_val": case.clip,
        "limit_train_batches": case.limit,
        "val_check_interval": case.validate_every,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(**(chosen | options))


def fit(rank: int, case: Case) -> tuple[list[torch.Tensor], list[int]]:
    """Train on this rank; what came of it."""
    quiet(rank)
    module = Module(case)
    held_out = None if case.val_counts is None else loader_of(case.kind, rank, case.val_counts[rank])
    trainer_of(case).fit(module, loader_of(case.kind, rank, case.counts[rank]), held_out)
    return module.state(), module.seen


def squared(data: Any) -> float:
    """What a batch may count."""
    return float(len(data[0]) ** 2)


def in_one_process(case: Case) -> list[torch.Tensor]:
    """The same, by hand, on the same global batches; BatchNorm's statistics are those of the lowest rank with data."""
    net = build(case)
    optimizer, scheduler = optimizers_of(net)
    known: dict[Any, Any] = {"equal": lambda data: 1.0, "samples": lambda data: len(data[0])}
    counts_as = known.get(case.weigh, case.weigh)
    done = 0
    for epoch in range(case.epochs):
        steps = min(max(case.counts), case.limit or 1000)
        for start in range(0, steps, case.accumulate):
            if done == case.max_steps:
                return flat(net, optimizer)
            window = range(start if epoch or start else case.lost, min(start + case.accumulate, steps))
            ranks = {step: [rank for rank in (0, 1) if step < case.counts[rank]] for step in window}
            micro = [(rank == ranks[step][0], batch(rank, step, epoch)) for step in window for rank in ranks[step]]
            total = math.fsum(counts_as(each) for _, each in micro)
            optimizer.zero_grad()
            for is_lowest, each in micro:
                buffers = [buffer.clone() for buffer in net.buffers()]
                (nn.functional.mse_loss(net(each[0]), each[1]) * counts_as(each) / total).backward()
                for buffer, before in zip(net.buffers(), buffers, strict=True):
                    if not is_lowest:
                        buffer.copy_(before)
            if case.clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), case.clip)
            optimizer.step()
            done += 1
            if case.scheduler == "step":
                scheduler.step()
        if case.scheduler == "epoch":
            scheduler.step()
    return flat(net, optimizer)


class Counting(Module):
    """Notes the samples that it is trained on."""

    def training_step(self, data: Any, index: int) -> torch.Tensor:
        if not getattr(self.trainer.strategy, "shadowing", False):
            self.seen += [int(each) for each in data[0]]
        return self.net(data[0].unsqueeze(1).expand(-1, 4)).square().mean()

"""Manual optimization: a generator and a critic, each with an optimizer of its own."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("lightning", reason="needs the extra lightning: make test-frameworks")

import lightning.pytorch as pl  # pyright: ignore[reportMissingImports]
import torch
from torch import nn

from joinables.integrations.lightning import JoinStrategy
from tests.ending import Ending
from tests.integrations.lightning.training import FEATURES, Case, batch, loader_of, quiet, trainer_of


def parts() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    return nn.Linear(FEATURES, FEATURES), nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1))


def critic_loss(generator: nn.Module, critic: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return critic(generator(x).detach()).square().mean() - critic(x).mean()


def generator_loss(generator: nn.Module, critic: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return -critic(generator(x)).mean()


class Adversaries(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = parts()

    def training_step(self, data: Any, index: int) -> None:
        of_generator, of_critic = self.optimizers()
        for optimizer, loss in ((of_critic, critic_loss), (of_generator, generator_loss)):
            self.toggle_optimizer(optimizer)
            value = loss(self.generator, self.critic, data[0])
            self.log(loss.__name__, value, sync_dist=True)
            optimizer.zero_grad()
            self.manual_backward(value)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def validation_step(self, data: Any, index: int) -> None:
        self.log("val", self.critic(data[0]).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=0.02) for part in (self.generator, self.critic)]


class Accumulating(Adversaries):
    """Steps each optimizer after two batches, and after the last one."""

    def __init__(self, blocks: bool) -> None:
        super().__init__()
        self.blocks = blocks

    def training_step(self, data: Any, index: int) -> None:
        ends = index % 2 == 1 or self.trainer.is_last_batch
        of_generator, of_critic = self.optimizers()
        for optimizer, loss in ((of_critic, critic_loss), (of_generator, generator_loss)):
            with optimizer.toggle_model(sync_grad=ends or not self.blocks):
                self.manual_backward(loss(self.generator, self.critic, data[0]) / 2)
                if ends:
                    optimizer.step()
                    optimizer.zero_grad()


def train(rank: int, case: Case) -> tuple[list[torch.Tensor], int]:
    quiet(rank)
    module = Adversaries()
    trainer = trainer_of(case, strategy=JoinStrategy(find_unused_parameters=True))
    trainer.fit(module, loader_of(case.kind, rank, case.counts[rank]), loader_of(case.kind, rank, rank))
    return [each.detach().clone() for each in module.parameters()], trainer.global_step


@pytest.mark.parametrize("counts", [(4, 2), (0, 3)], ids=str)
def test_as_one_process(ending: Ending, counts: tuple[int, int]) -> None:
    case = Case(counts=counts)
    ranks = ending.run(train, case, ranks=2)
    generator, critic = parts()
    of_generator, of_critic = (torch.optim.Adam(part.parameters(), lr=0.02) for part in (generator, critic))
    for epoch in range(case.epochs):
        for step in range(max(counts)):
            data = [batch(rank, step, epoch)[0] for rank in (0, 1) if step < counts[rank]]
            total = math.fsum(map(len, data))
            for optimizer, loss in ((of_critic, critic_loss), (of_generator, generator_loss)):
                optimizer.zero_grad()
                torch.stack([loss(generator, critic, x) * len(x) / total for x in data]).sum().backward()
                optimizer.step()
    expected = [each.detach() for part in (generator, critic) for each in part.parameters()]
    for state, steps in ranks:
        torch.testing.assert_close(state, expected, rtol=1e-4, atol=2e-6)
        assert steps == 2 * case.epochs * max(counts)


def accumulate(rank: int, counts: tuple[int, int], blocks: bool) -> list[torch.Tensor]:
    quiet(rank)
    module = Accumulating(blocks)
    trainer = trainer_of(Case(epochs=1), strategy=JoinStrategy(find_unused_parameters=True))
    trainer.fit(module, loader_of("stream", rank, counts[rank]))
    return [each.detach().clone() for each in module.parameters()]


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("counts", [(5, 2), (0, 3)], ids=str)
def test_windows_of_the_module_itself(ending: Ending, counts: tuple[int, int], blocks: bool) -> None:
    """Also where it has Lightning block the reductions of the gradients until the window ends."""
    pairs = parts()
    optimizers = [torch.optim.Adam(part.parameters(), lr=0.02) for part in pairs]
    for step in range(max(counts)):
        data = [batch(rank, step)[0] for rank in (0, 1) if step < counts[rank]]
        total = 2 * math.fsum(map(len, data))
        for at, loss in ((1, critic_loss), (0, generator_loss)):
            pairs[1 - at].requires_grad_(False)
            torch.stack([loss(*pairs, x) * len(x) / total for x in data]).sum().backward()
            pairs[1 - at].requires_grad_(True)
            if step % 2 == 1 or step + 1 == max(counts):
                optimizers[at].step()
                optimizers[at].zero_grad()
    expected = [each.detach() for part in pairs for each in part.parameters()]
    for state in ending.run(accumulate, counts, blocks, ranks=2):
        torch.testing.assert_close(state, expected, rtol=1e-4, atol=2e-6)

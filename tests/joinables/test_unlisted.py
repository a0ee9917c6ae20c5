"""A plain block warns about an optimizer, scheduler or scaler that it should list, and a loop about a module."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from join import Join
from joinables._torch.objects import zero_redundancy_optimizer
from tests.harness import Pool
from tests.training import batch, build


class Wrapper(torch.optim.Optimizer):
    """Optimizer around another one, which shares its groups and state."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        super().__init__(optim.param_groups, {})
        self.optim, self.state = optim, optim.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optim.step()


class Training:
    """Objects of a training, of which a block lists some."""

    def __init__(self, optimizer: str = "AdamW", **options: Any) -> None:
        self.ddp = DistributedDataParallel(build("mlp"))
        if optimizer == "zero":
            self.optimizer: Any = zero_redundancy_optimizer()(self.ddp.parameters(), torch.optim.AdamW)
        else:
            self.optimizer = getattr(torch.optim, optimizer)(self.ddp.parameters(), lr=0.01, **options)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.scaler = torch.amp.GradScaler("cpu")

    def warnings_of(self, rank: int, listed: list[Any], *, iterate: bool = False, even: bool = False) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with Join([self.ddp, *listed]) as join:
                batches = [batch(rank, 0, step) for step in range(2 if even else 2 * rank)]
                for x, y in join.iterate(batches) if iterate else batches:
                    self.step(((self.ddp(x) - y) ** 2).mean())
        assert all(warning.filename == __file__ for warning in caught)
        return [str(warning.message) for warning in caught]

    def step(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Scheduled(Training):
    def step(self, loss: torch.Tensor) -> None:
        super().step(loss)
        self.scheduler.step()


class Scaled(Training):
    def step(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def missing(rank: int, of: type[Training], names: list[str]) -> list[str]:
    training = of()
    return training.warnings_of(rank, [getattr(training, name) for name in names])


@pytest.mark.parametrize(
    ("of", "listed", "fix"),
    [
        (Training, [], "Join([DistributedDataParallel, AdamW])"),
        (Scheduled, ["optimizer"], "Join([DistributedDataParallel, AdamW, scheduler])"),
        (Scaled, ["optimizer"], "Join([DistributedDataParallel, AdamW, GradScaler])"),
    ],
)
def test_it_names_the_missing_object(pool: Pool, of: type[Training], listed: list[str], fix: str) -> None:
    none, some = pool.run(missing, of, listed, ranks=2)
    assert not none or "scheduler" in fix  # rank 0 has no batch, and steps nothing
    assert len(some) == 1
    assert some[0].endswith(f"List it: {fix}. [J891]")
    assert "scheduler" in fix or " at test_unlisted.py:" in some[0]


class Halves(Training):
    """Two optimizers of one module. The second one, which is not listed, steps after the first."""

    def __init__(self) -> None:
        super().__init__()
        weight, *rest = self.ddp.parameters()
        self.first, self.optimizer = torch.optim.Adam([weight]), torch.optim.AdamW(rest)

    def step(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.first.step()
        self.optimizer.step()
        self.ddp.zero_grad()


def test_two_optimizers_of_one_module(pool: Pool) -> None:
    _, some = pool.run(missing, Halves, ["first"], ranks=2)
    assert len(some) == 1 and some[0].startswith("AdamW stepped the parameter module.")


def everything_listed(rank: int) -> list[list[str]]:
    scheduled, scaled, zero, wrapped, unscaled = Scheduled(), Scaled(), Training("zero"), Training(), Scaled()
    wrapped.optimizer = Wrapper(wrapped.optimizer)
    unscaled.scaler = torch.amp.GradScaler("cpu", enabled=False)
    return [
        scheduled.warnings_of(rank, [scheduled.optimizer, scheduled.scheduler]),
        scaled.warnings_of(rank, [scaled.optimizer, scaled.scaler]),
        zero.warnings_of(rank, [zero.optimizer]),
        wrapped.warnings_of(rank, [wrapped.optimizer.optim]),
        unscaled.warnings_of(rank, [unscaled.optimizer]),
    ]


def nothing_to_list(rank: int) -> list[list[str]]:
    return [
        Training("SGD").warnings_of(rank, []),
        Training().warnings_of(rank, [], even=True),
        Scheduled().warnings_of(rank, [], iterate=True),
    ]


def in_two_blocks(rank: int) -> list[list[str]]:
    other, training = Training(), Scaled()
    with Join([other.ddp, training.optimizer]):  # nothing trains its module, whatever is in the other block
        return [training.warnings_of(rank, [training.scaler])]


@pytest.mark.parametrize("run", [everything_listed, nothing_to_list, in_two_blocks])
def test_it_is_silent_where_nothing_is_missing(pool: Pool, run: Callable[[int], list[list[str]]]) -> None:
    for messages in pool.run(run, ranks=2):
        assert not any(messages)


def of_unlisted_modules(rank: int, kind: str, way: str) -> list[str]:
    listed, other = DistributedDataParallel(build("mlp")), build("mlp")
    if kind == "fully_shard":
        fully_shard(other, mesh=init_device_mesh("cpu", (2,)))
    elif kind != "plain":
        other = DistributedDataParallel(other)
    optimizer = torch.optim.SGD([*listed.parameters(), *other.parameters()], lr=0.1, foreach=False)
    objects = [listed, other, optimizer] if kind == "listed" else [listed, optimizer]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Join(objects, divide_by_initial_world_size=False) as join:
            for x, y in join.iterate([batch(rank, 0, step) for step in range(3 * rank)]):
                optimizer.zero_grad()
                loss = (listed(x) + other(x) - y).square().mean()
                (join.scale(loss) if way == "scaled" else loss).backward()
                optimizer.step()
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("kind", ["DistributedDataParallel", "fully_shard", "plain"])
def test_a_second_module_of_a_loop(pool: Pool, kind: str) -> None:
    for texts in pool.run(of_unlisted_modules, kind, "", ranks=2):
        assert len(texts) == 1, texts  # although there are three steps
        assert "SGD steps 6 parameters of no listed module" in texts[0]
        assert "join.scale(loss)" in texts[0]


@pytest.mark.parametrize(("kind", "way"), [("DistributedDataParallel", "scaled"), ("listed", "")])
def test_a_second_module_that_is_right(pool: Pool, kind: str, way: str) -> None:
    assert pool.run(of_unlisted_modules, kind, way, ranks=2) == [[], []]


def enters_a_block_in_each_step(rank: int) -> int:
    training, other, calls = Training(), Training(), list[Any]()

    def evaluate(*_: Any) -> None:
        with Join([other.ddp]) as join:
            calls.extend(join.iterate(range(rank)))

    evaluate()  # the first block of a process adds the hook
    handles = [register_optimizer_step_post_hook(hook) for hook in (evaluate, lambda *_: None)]
    for step in range(2):
        x, y = batch(rank, 0, step)
        training.step(((training.ddp(x) - y) ** 2).mean())
    for handle in handles:
        handle.remove()
    return len(calls)


def test_a_block_in_a_hook_of_all_optimizers(pool: Pool) -> None:
    """A block adds a hook, too, and removes it. Rank 0 has no data."""
    assert pool.run(enters_a_block_in_each_step, ranks=2) == [3, 3]

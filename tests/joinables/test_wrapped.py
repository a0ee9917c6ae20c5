"""Objects that a framework has wrapped, by wrappers like theirs; ``tests/integrations`` has the real ones."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from join import Join, ProtocolError
from join.registry import joinables_of
from joinables.wrapped import holds_optimizers, unwrapped
from tests.harness import Pool, all_or_each
from tests.training import assert_same, batch, build, flat_state


class Accelerated(torch.optim.Optimizer):
    """Like Accelerate's, whose constructor does not call that of its base class."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups


class Delegates:
    """Like fairseq's: no optimizer itself, and without parameter groups."""

    def __init__(self, optimizer: torch.optim.Optimizer, name: str = "_optimizer") -> None:
        setattr(self, name, optimizer)
        self.state_dict, self.load_state_dict = optimizer.state_dict, optimizer.load_state_dict
        self.step = optimizer.step


class Shares(torch.optim.Optimizer):
    """Like torch's ``PostLocalSGDOptimizer``: it shares the state of the optimizer inside, under any of these names."""

    def __init__(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        setattr(self, name, optimizer)
        self.param_groups, self.state = optimizer.param_groups, optimizer.state


class Several(torch.optim.Optimizer):
    """Optimizers in one, whose constructor does not call that of the base class."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    def state_dict(self) -> Any:
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state_dict(self, state_dict: Any) -> None:
        for optimizer, state in zip(self.optimizers, state_dict, strict=True):
            optimizer.load_state_dict(state)

    def step(self, closure: Any = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


class AcceleratedScheduler:
    def __init__(self, scheduler: Any, optimizer: Any) -> None:
        self.scheduler, self.optimizer = scheduler, optimizer

    def state_dict(self) -> Any:
        return self.scheduler.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.scheduler.load_state_dict(state)


class Fabric(nn.Module):
    def __init__(self, forward_module: nn.Module, original: nn.Module) -> None:
        super().__init__()
        self._forward_module, self._original_module = forward_module, original


NAMES = "optimizer", "optim", "base_optimizer", "_optimizer"


def things() -> dict[str, tuple[Any, Any]]:
    """Wrapped ones, and what is inside."""
    model = nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.9)
    wrapped = Accelerated(sgd)
    compiled: Any = torch.compile(model, backend="eager")
    return {
        "optimizer": (wrapped, sgd),
        "twice": (Accelerated(wrapped), sgd),
        **{f"{cls.__name__}.{name}": (cls(sgd, name), sgd) for cls in (Shares, Delegates) for name in NAMES},
        "scheduler": (AcceleratedScheduler(scheduler, wrapped), scheduler),
        "module": (Fabric(model, model), model),
        "compiled": (torch.compile(Fabric(compiled, model), backend="eager"), model),
        "no wrapper: module": (model, model),
        "no wrapper: optimizer": (sgd, sgd),
        "no wrapper: scheduler": (scheduler, scheduler),
    }


def test_what_is_inside() -> None:
    for name, (outer, inner) in things().items():
        assert unwrapped(outer) is inner, name
        assert [each.join_target for each in joinables_of(outer)] == [inner], name


def trained(rank: int, kind: str, iterates: bool) -> dict[str, torch.Tensor]:
    ddp = DistributedDataParallel(build("mlp"))
    first, *rest = ddp.parameters()
    inner = [torch.optim.Adam(parameters, lr=0.1) for parameters in ([first], rest)]
    outer: Any = Several(*inner)
    if "." in kind:
        inner = [torch.optim.Adam(ddp.parameters(), lr=0.1)]
        cls, _, name = kind.partition(".")
        outer = {"Shares": Shares, "Delegates": Delegates}[cls](inner[0], name)
        outer.step = inner[0].step
    if kind == "averages":
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        inner = [torch.optim.Adam(ddp.parameters(), lr=0.1)]
        outer = PostLocalSGDOptimizer(inner[0], PeriodicModelAverager(period=100, warmup_steps=50))
    with Join([ddp, outer], divide_by_initial_world_size=False) as join:
        data = [batch(rank, 0, step) for step in range((2, 4, 0)[rank])]
        for x, y in join.iterate(data) if iterates else data:
            ddp.zero_grad()
            (ddp(x) - y).square().mean().backward()
            outer.step()
    return flat_state(ddp.module.state_dict(), *(optimizer.state_dict() for optimizer in inner))


KINDS = ["averages", "several", *[f"{cls}.{name}" for cls in ("Shares", "Delegates") for name in NAMES]]


@pytest.mark.parametrize(("kind", "iterates"), all_or_each(product(KINDS, [False, True])))
def test_optimizers_without_the_constructor_of_their_base_class(pool: Pool, kind: str, iterates: bool) -> None:
    model = build("mlp")
    first, *rest = model.parameters()
    groups = [[first], rest] if kind == "several" else [[first, *rest]]
    optimizers = [torch.optim.Adam(parameters, lr=0.1) for parameters in groups]
    for step in range(4):
        model.zero_grad()
        pairs = [batch(rank, 0, step) for rank, count in enumerate((2, 4, 0)) if step < count]
        sum((model(x) - y).square().mean() for x, y in pairs).div(len(pairs)).backward()  # pyright: ignore
        for optimizer in optimizers:
            optimizer.step()
    expected = flat_state(model.state_dict(), *(optimizer.state_dict() for optimizer in optimizers))
    for state in pool.run(trained, kind, iterates, ranks=3):
        assert_same(state, expected, 1e-6)


class Delegating(torch.optim.Optimizer):
    """Like Lightning's, with the state of the optimizer inside."""

    def __init__(self, inner: torch.optim.Optimizer, *, shares: bool) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        if shares:
            self.state = inner.state


def test_an_optimizer_that_shares_its_state_with_the_one_inside() -> None:
    sgd = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    assert not holds_optimizers(Delegating(sgd, shares=True))
    with pytest.raises(TypeError, match=r"Delegating contains the optimizer SGD in \.inner"):
        holds_optimizers(Delegating(sgd, shares=False))


class Counting:
    """A wrapper that sets learning rates by a counter of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self) -> None:
        self.steps += 1
        self.param_groups[0]["lr"] = 0.1 / self.steps
        self.optimizer.step()

    def state_dict(self) -> Any:
        return {"steps": self.steps, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.steps = state["steps"]
        self.optimizer.load_state_dict(state["optimizer"])


def count_steps(rank: int) -> int:
    ddp = DistributedDataParallel(build("mlp"))
    optimizer = Counting(torch.optim.Adam(ddp.parameters()))
    with Join([ddp, optimizer]):
        for step in range(3 * (1 - rank)):
            x, y = batch(rank, 0, step)
            optimizer.optimizer.zero_grad()
            ((ddp(x) - y) ** 2).mean().backward()
            optimizer.step()
    return optimizer.steps


def test_a_wrapper_with_more_state_than_the_optimizer_inside(pool: Pool) -> None:
    assert pool.run(count_steps, ranks=2) == [3, 3]


def enters_with_another_rate(rank: int, kind: str) -> str:
    ddp = DistributedDataParallel(build("mlp"))
    first, *rest = ddp.parameters()
    inner = [torch.optim.Adam(parameters, lr=0.1) for parameters in ([first], rest)]
    outer: Any = Several(*inner) if kind == "Several" else Counting(inner[0])
    outer.param_groups[0]["lr"] = 0.6 if rank == 2 else 0.1
    with pytest.raises(ProtocolError) as caught, Join([ddp, outer]):
        for step in range((2, 3, 0)[rank]):
            ddp(batch(rank, 0, step)[0]).sum().backward()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["Several", "Counting"])
def test_rates_of_a_wrapper_that_differ_on_entering_are_an_error(pool: Pool, kind: str) -> None:
    for text in pool.run(enters_with_another_rate, kind, ranks=3):
        assert f"['lr'] of parameter group 0 of {kind} is 0.1 on rank 0, 0.1 on rank 1, 0.6 on rank 2" in text


def test_an_optimizer_that_holds_its_scheduler() -> None:
    optimizer: Any = torch.optim.Adam(nn.Linear(1, 1).parameters())
    optimizer.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert unwrapped(optimizer) is optimizer

"""Objects that a framework has wrapped, by wrappers like theirs; ``tests/integrations`` has the real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from join.registry import joinables_of
from joinables.wrapped import holds_optimizers, unwrapped


class Accelerated(torch.optim.Optimizer):
    """Like Accelerate's, whose constructor does not call that of its base class."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups


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
        "scheduler": (AcceleratedScheduler(scheduler, wrapped), scheduler),
        "module": (Fabric(model, model), model),
        "compiled": (torch.compile(Fabric(compiled, model), backend="eager"), model),
        "no wrapper: module": (model, model),
        "no wrapper: optimizer": (sgd, sgd),
        "no wrapper: scheduler": (scheduler, scheduler),
    }


@pytest.mark.parametrize("name", things())
def test_what_is_inside(name: str) -> None:
    outer, inner = things()[name]
    assert unwrapped(outer) is inner
    assert [each.join_target for each in joinables_of(outer)] == [inner]


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
    with pytest.raises(TypeError, match=r"Delegating contains a SGD in \.inner"):
        holds_optimizers(Delegating(sgd, shares=False))

"""Blocks that do nothing: ``enable=False``, and a single process. Losses are scaled as in a block of several ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

from join import Join, JoinError
from join.step_hook import after_step
from tests.harness import Pool

WEIGHTS = (2, 1, 4, 0, 3)


def net() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1).double()


def batch(step: int) -> torch.Tensor:
    return torch.full((2, 3), 1.0 + step).double()


def expected(steps: range) -> torch.Tensor:
    """The gradient of the weighted mean over these steps: losses are linear."""
    return sum(WEIGHTS[step] * batch(step)[0] for step in steps) / sum(WEIGHTS[step] for step in steps)  # type: ignore[operator]


def accumulate(module: torch.nn.Module, join: Join, steps: range, loss_divided_by: int = 1) -> None:
    for step in steps:
        join.weight = WEIGHTS[step]
        is_last = step == steps[-1]
        with nullcontext() if is_last or not isinstance(module, DistributedDataParallel) else module.no_sync():
            join.scale(module(batch(step)).mean() / loss_divided_by).backward()


def check(model: torch.nn.Linear, gradient: torch.Tensor) -> None:
    assert model.weight.grad is not None
    torch.testing.assert_close(model.weight.grad[0], gradient)


@pytest.mark.parametrize("listed", ["module", "optimizer", "both"])
@pytest.mark.parametrize("divisor", [1, 4])
def test_a_window_in_one_process(listed: str, divisor: int) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    objects = {"module": [model], "optimizer": [optimizer], "both": [model, optimizer]}[listed]
    with Join(objects, loss_divided_by=divisor) as join:
        accumulate(model, join, range(5), divisor)
    check(model, expected(range(5)))


def disabled(rank: int, to_none: bool) -> torch.Tensor:
    ddp = DistributedDataParallel(net())
    with Join([ddp], enable=False) as join:
        accumulate(ddp, join, range(3))
        ddp.zero_grad(set_to_none=to_none)
        accumulate(ddp, join, range(2, 5))
    return ddp.module.weight.grad[0]


@pytest.mark.parametrize("to_none", [False, True])
def test_windows_of_ddp(pool: Pool, to_none: bool) -> None:
    for found in pool.run(disabled, to_none, ranks=2):
        torch.testing.assert_close(found, expected(range(2, 5)))


@pytest.mark.parametrize("ends", ["zeroed in place", "set to None", "a step", "not"])
@pytest.mark.parametrize("blocks", [1, 2])
def test_where_a_window_ends(ends: str, blocks: int) -> None:
    """A window may last longer than its block. After a step, gradients that were not zeroed are added to."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    join = Join([model, optimizer]).open()
    accumulate(model, join, range(3))
    if ends == "a step":
        optimizer.step()
    elif ends != "not":
        optimizer.zero_grad(set_to_none=ends == "set to None")
    if blocks == 2:
        join.close()
        join.open()
    accumulate(model, join, range(3, 5))
    join.close()
    gradient = expected(range(5)) if ends == "not" else expected(range(3, 5))
    check(model, gradient + (expected(range(3)) if ends == "a step" else 0.0))


def test_a_step_with_another_hook_of_all_optimizers() -> None:
    """The hook of windows goes in the step that ends the last one, though another hook follows."""
    model, calls = net(), list[Any]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model, optimizer]) as join:
        accumulate(model, join, range(3))
        assert after_step.functions
        other = register_optimizer_step_post_hook(lambda *call: calls.append(call))
        optimizer.step()
        assert len(calls) == 1
        other.remove()
    assert not after_step.functions


def test_a_loss_behind_a_reentrant_checkpoint() -> None:
    model = net()
    with Join([model]) as join:
        for step in range(3):
            join.weight, x = WEIGHTS[step], batch(step).requires_grad_()
            with pytest.raises(JoinError, match="J565"):
                join.scale(checkpoint(model, x, use_reentrant=True).mean()).backward()


def test_modules_whose_windows_have_other_weights() -> None:
    one, other = net(), net()
    with Join([one, other]) as join:
        join.weight = 1
        join.scale(one(batch(0)).mean()).backward()
        with pytest.raises(JoinError, match="J564"):
            join.scale((one(batch(1)) + other(batch(1))).mean()).backward()


def test_a_loop_inside_a_loop() -> None:
    """As on several ranks."""
    with Join([net()]) as join, pytest.raises(JoinError, match="J090"):
        for _ in join.iterate(range(2)):
            assert len(list(join.iterate(range(2)))) == 2


def built_early(rank: int, join: Join) -> str:
    with pytest.raises(ValueError, match="J013") as caught, join:
        pass
    return str(caught.value)


def test_a_join_that_was_built_before_the_process_group(pool: Pool) -> None:
    """What a block does is decided when it is entered."""
    for text in pool.run(built_early, Join([net()]), ranks=2):
        assert "lists no object that communicates" in text


class Forced(torch.nn.Linear):
    """A forward that writes to the weight, which is no step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.copy_(self.weight / self.weight.norm())
        return super().forward(x)


def test_a_forward_that_writes_to_parameters() -> None:
    model = Forced(3, 1).double()
    with Join([model]) as join:
        accumulate(model, join, range(3))
    check(model, expected(range(3)))


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_without_zero_grad(fused: bool) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    with Join([model, optimizer]) as join:
        accumulate(model, join, range(2))
        optimizer.step()
        accumulate(model, join, range(1, 3))
    check(model, expected(range(2)) + expected(range(1, 3)))


def test_two_losses_in_one_backward() -> None:
    model = net()
    with Join([model]) as join:
        for step in range(3):
            join.weight = WEIGHTS[step]
            (join.scale(model(batch(step)).mean()) + join.scale(model(batch(step)).mean())).backward()
    check(model, 2 * expected(range(3)))


def test_gradients_that_are_computed_alone_do_not_count() -> None:
    model = net()
    with Join([model]) as join:
        for step in range(3):
            join.weight, x = WEIGHTS[step], batch(step).requires_grad_()
            loss = join.scale(model(x).mean())
            torch.autograd.grad(loss, x, retain_graph=True)
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            loss.backward()
    check(model, expected(range(3)))


def looped(join: Join) -> list[Any]:
    with join:
        assert Join.current() is join
        seen = [(join.mean(float(x)), join.total_weight, join.is_last_step) for x in join.iterate([1, 2], weigh=float)]
    return [*seen, join.report.even]


@pytest.mark.parametrize("options", [{}, {"enable": False}], ids=str)
def test_a_block_that_lists_nothing(options: dict[str, Any]) -> None:
    wanted = looped(Join([net()], **options))
    assert wanted == [(1.0, 1.0, False), (2.0, 2.0, True), True]
    assert looped(Join([], process_group=None, **options)) == wanted
    assert looped(Join([net()], process_group=None, **options)) == wanted


def test_one_of_several_processes_needs_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for joinables in ([], [None]):
        with pytest.raises(ValueError, match="J022"):
            Join(joinables, process_group=None)

"""Functions of ``accelerate.utils``, options of plugins, compiled models and schedules, in a block."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import joinables
from join import JoinError
from tests.examples import examples_of
from tests.harness import Pool
from tests.integrations.ranks import accelerator, imported, launched
from tests.training import assert_same, batch, build

pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install joinables[accelerate]")

COUNTS = (3, 0)
FUNCTIONS = ("gather", "reduce", "gather_object")


def call(rank: int, name: str, debug: bool) -> list[int]:
    """Call a function in a step, in an evaluation inside it, in a plain block, and afterwards."""
    from joinables.integrations.accelerate import join_uneven_inputs

    with launched(ACCELERATE_DEBUG_MODE="1" if debug else "0"):
        accelerate, utils = accelerator(), imported("accelerate.utils")
        function, pad = getattr(utils, name), utils.pad_across_processes
        model, optimizer = accelerate.prepare(net := build("mlp"), torch.optim.SGD(net.parameters(), 0.1))
        loader = accelerate.prepare(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(4))))
        value: Any = [rank] if name == "gather_object" else torch.tensor([float(rank)])
        counts: list[int] = []
        with join_uneven_inputs(accelerate, [model, optimizer], even_batches=False) as join:
            for step in join.iterate(list(range(COUNTS[rank]))):
                x, y = batch(rank, 0, step)
                accelerate.backward(((model(x) - y) ** 2).mean())
                optimizer.step()
                with pytest.raises(JoinError, match=rf"accelerate\.utils\.{name} would count dummies .* \[J521\]"):
                    function(value)
                pad(torch.ones(rank + 1))
                for _ in loader:
                    counts.append(len(function(value)))
        outside = pytest.raises(JoinError, match=rf"call accelerate\.utils\.{name} only in the body .* \[J116\]")
        with join_uneven_inputs(accelerate, [model, optimizer], even_batches=False), outside:
            function(value)
        counts.append(len(function(value)))
        return counts


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_would_count_dummies(pool: Pool, name: str) -> None:
    expected = 1 if name == "reduce" else 2
    for counts in pool.run(call, name, name == "reduce", ranks=2, timeout=60):
        assert counts == [expected] * (2 * max(COUNTS) + 1)


def refuse(rank: int) -> None:
    from joinables.integrations.accelerate import join_uneven_inputs

    with launched():
        plugin = imported("accelerate.utils").GradientAccumulationPlugin(2, sync_with_dataloader=False)
        accelerate = accelerator(gradient_accumulation_plugin=plugin)
        model = accelerate.prepare(build("mlp"))
        with pytest.raises(ValueError, match=r"sync_with_dataloader=False, .* \[J121\]"):
            join_uneven_inputs(accelerate, [model])


def test_windows_over_epochs_are_refused(pool: Pool) -> None:
    pool.run(refuse, ranks=2, timeout=60)


def unwrap(rank: int) -> None:
    from joinables.integrations.accelerate import join_uneven_inputs

    with launched():
        accelerate = accelerator(dynamo_backend="eager")
        model, optimizer = accelerate.prepare(net := build("mlp"), torch.optim.SGD(net.parameters(), 0.1))
        for keep in (False, True):
            with join_uneven_inputs(accelerate, [model, optimizer]) as join:
                for step in join.iterate(list(range(COUNTS[rank]))):
                    x, y = batch(rank, 0, step)
                    accelerate.backward(((model(x) - y) ** 2).mean())
                    optimizer.step()
            accelerate.unwrap_model(model, keep_torch_compile=keep)
        with pytest.raises(ValueError, match=r"pass keep_torch_compile=False to accelerator\.unwrap_model\. \[J013\]"):
            join_uneven_inputs(accelerate, [model, optimizer])


@pytest.mark.in_test_all
def test_a_compiled_model_that_was_unwrapped(pool: Pool) -> None:
    pool.run(unwrap, ranks=2, timeout=120)


def schedule(rank: int) -> dict[str, torch.Tensor]:
    from joinables.integrations.accelerate import join_uneven_inputs

    with launched():
        accelerate, net = accelerator(), build("mlp")
        optimizer, loader = (
            torch.optim.SGD(net.parameters(), 0.1),
            [batch(rank, 0, step) for step in range(COUNTS[rank])],
        )
        names: dict[str, Any] = {"joinables": joinables, "torch": torch, "accelerator": accelerate, "epochs": 2}
        names |= {"optimizer": optimizer, "loader": loader}
        [code] = [each.code for each in examples_of("frameworks/accelerate.md") if "joinables.steps" in each.code]
        exec(code, names)
        model, optimizer, scheduler = accelerate.prepare(net, optimizer, names["scheduler"])
        for _ in range(2):
            with join_uneven_inputs(accelerate, [model, optimizer, scheduler], even_batches=False):
                for x, y in loader:
                    optimizer.zero_grad()
                    accelerate.backward(((model(x) - y) ** 2).mean())
                    optimizer.step()
                    scheduler.step()
        return net.state_dict()


def test_a_schedule_of_the_steps_of_all_ranks(pool: Pool) -> None:
    net = build("mlp")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0, 1 - step / 6))
    for step in [*range(3), *range(3)]:
        x, y = batch(0, 0, step)
        optimizer.zero_grad()
        ((net(x) - y) ** 2).mean().backward()
        optimizer.step()
        scheduler.step()
    for state in pool.run(schedule, ranks=2, timeout=60):
        assert_same(state, net.state_dict(), 1e-5)

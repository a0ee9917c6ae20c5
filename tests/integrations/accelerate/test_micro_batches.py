"""Micro-batches that the loop body cuts or collects, and losses that it divides by the samples of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from join import JoinError
from tests.harness import Pool
from tests.integrations.accelerate.micro_batches import STEPS, alone, cut, divide
from tests.integrations.ranks import accelerator, launched
from tests.training import assert_same, build

pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install joinables[accelerate]")


def train(rank: int, body: Any, option: bool | str) -> dict[str, torch.Tensor] | str:
    from joinables.integrations.accelerate import join_uneven_inputs

    with launched():
        accelerate = accelerator(gradient_accumulation_steps=STEPS)
        net = build("mlp")
        model, optimizer = accelerate.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        by_all = body is divide
        try:
            with join_uneven_inputs(accelerate, [model, optimizer], divide_by_initial_world_size=by_all) as join:
                body(accelerate, join, model, optimizer, rank, option)
        except JoinError as error:
            return str(error)
        return net.state_dict()


@pytest.mark.parametrize(("body", "option"), [(cut, True), (divide, False)])
def test_the_line_to_write_is_exact(pool: Pool, body: Any, option: bool) -> None:
    expected = alone(body)
    for state in pool.run(train, body, option, ranks=2, timeout=40):
        assert_same(state, expected, 1e-5)


@pytest.mark.parametrize(
    ("body", "option", "told"),
    [
        (cut, False, "accelerator.accumulate was entered again"),
        (divide, True, "2 losses were scaled in step 2"),
        (
            divide,
            "gather",
            "got one number as a row on each rank in step 1, but the batches have 2 samples or more. A sum of",
        ),
    ],
)
def test_what_would_be_wrong_is_refused_on_all_ranks(pool: Pool, body: Any, option: bool | str, told: str) -> None:
    for text in pool.run(train, body, option, ranks=2, timeout=40):
        assert told in text and ("[J600]" in text) is (body is cut) and ("[J765]" in text) is (option == "gather")

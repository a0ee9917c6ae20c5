"""Losses that take other ways than the outputs of a sharded module: FSDP1 and ``fully_shard``, over ``join.iterate``.

Torch itself begins the backward of a sharded module at its outputs. So a loss that has no part of them is an error of
FSDP1, and is right in ``fully_shard`` only if the layer that ends the way is sharded by itself.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import nn

from join import Join
from tests.ending import Ending
from tests.harness import Pool, all_or_each
from tests.training import TOLERANCE, batch, mesh_of, whole
from tests.ways import Model

EPOCHS = (3, 5, 0), (4, 3, 6)
HIDDEN = "attribute", "hook", "object", "distribution", "nothing"
BESIDE = "outputs", "attribute beside outputs", "tuple with an object", "dataclass"
"""Ways that a part of the loss takes. Another part is a mean of the outputs."""


class Case(NamedTuple):
    way: str
    engine: str
    dummy: str
    window: int
    weighs: bool


def weight_in(row: Any) -> int:
    return int(row[2])


def data(case: Case, rank: int, epoch: int) -> list[Any]:
    weights = [2 + (rank + step) % 3 if case.weighs else 1 for step in range(EPOCHS[epoch][rank])]
    return [(*batch(rank, epoch, step), torch.tensor([weight])) for step, weight in enumerate(weights)]


def loss_of(module: Model, output: Any, y: torch.Tensor) -> torch.Tensor:
    if module.way in HIDDEN:
        return module.loss(y)
    if module.way == "outputs":
        module.z = output
    shown = getattr(output, "probabilities", output)
    shown = shown["probabilities"] if isinstance(shown, dict) else shown[0] if isinstance(shown, tuple) else shown
    return module.loss(y) + cast("torch.Tensor", shown).square().mean()


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def alone(case: Case) -> list[torch.Tensor]:
    model = Model(case.way)
    optimizer = optimizer_of(model)
    for epoch, counts in enumerate(EPOCHS):
        for first in range(0, max(counts), case.window):
            rows = [row for rank in range(3) for row in data(case, rank, epoch)[first : first + case.window]]
            total = sum(int(weight) for *_, weight in rows)
            for x, y, weight in rows:
                (int(weight) / total * loss_of(model, model(x), y)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [each.detach() for each in model.parameters()]


def sharded(case: Case, module: Model) -> Any:
    if case.engine == "FSDP1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of()
    if "layers" in case.engine:
        for part in (module.first, module.last):
            fully_shard(part, mesh=mesh)
    fully_shard(module, mesh=mesh)
    for part in cast("Any", module.modules()):
        if hasattr(part, "set_force_sum_reduction_for_comms"):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply
    return module


def train(rank: int, case: Case) -> list[torch.Tensor]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    module = Model(case.way)
    model = sharded(case, module)
    optimizer = optimizer_of(model)
    divided_over = None if case.engine == "FSDP1" else 1
    for epoch in range(len(EPOCHS)):
        options: dict[str, Any] = {"weigh": weight_in} if case.weighs else {}
        with Join([model, optimizer], divide_by_initial_world_size=False) as join:
            rows = data(case, rank, epoch)
            for x, y, _ in join.iterate(rows, dummy=cast("Any", case.dummy), window=case.window, **options):
                join.scale(loss_of(module, model(x), y), divided_over).backward()
                if join.ends_window:
                    optimizer.step()
                    optimizer.zero_grad()
    if case.engine == "FSDP1":
        with FullyShardedDataParallel.summon_full_params(model):
            return [each.detach().clone() for each in module.parameters()]
    return whole([each.detach() for each in module.parameters()])


ENGINES = "FSDP1", "fully_shard", "fully_shard, layers"
OPTIONS = (1, 2), (False, True)
CASES = [
    *(Case(*row) for row in itertools.product(HIDDEN, ENGINES[-1:], ("last",), *OPTIONS)),
    *(Case(*row) for row in itertools.product(BESIDE, ENGINES, ("last",), *OPTIONS)),
    *(Case(*row) for row in itertools.product(("outputs",), ENGINES, ("empty",), *OPTIONS)),
]


def name_of(case: Case) -> str:
    return ": ".join(str(part) for part in case if part not in (1, False))


@pytest.mark.parametrize("case", all_or_each(CASES, together=2), ids=name_of)
def test_as_one_process(pool: Pool, case: Case) -> None:
    expected = alone(case)
    for found in pool.run(train, case):
        torch.testing.assert_close(found, expected, atol=10 * TOLERANCE, rtol=1e-4)


def fails(rank: int, engine: str, dummy: str) -> str:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        train(rank, Case("attribute", engine, dummy, 1, weighs=False))
    notes = getattr(caught.value, "__notes__", [])
    return "\n".join([str(caught.value), *notes])


@pytest.mark.parametrize(
    ("engine", "dummy", "words"),
    [("FSDP1", "last", "expected to be in states"), (ENGINES[-1], "empty", "pass dummy='last'")],
)
def test_what_cannot_be_right_is_an_error(ending: Ending, engine: str, dummy: str, words: str) -> None:
    for text in ending.run(fails, engine, dummy, ranks=3):
        assert words in text

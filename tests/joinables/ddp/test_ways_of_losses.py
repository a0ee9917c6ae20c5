"""Losses that take other ways than the outputs of the module, and penalties in backwards of their own."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from join import Join
from join.collectives import collective_of
from tests.harness import Pool, all_or_each
from tests.join.counter import Counter
from tests.training import FEATURES, TOLERANCE, batch, build
from tests.ways import Model

EPOCHS = (3, 5, 0), (4, 3, 6)

WAYS = (
    "outputs",
    "attribute",
    "attribute beside outputs",
    "attribute beside outputs, outside",
    "hook",
    "object",
    "tuple with an object",
    "dataclass",
    "distribution",
    "nothing",
    "outside",
    "adapter",
    "reentrant",
    "reentrant, hidden",
    "two reentrant, hidden",
)


class Case(NamedTuple):
    way: str
    block: str  # "plain", or a dummy of join.iterate
    weights: str  # "", "weights", or "with 0": a batch of weight 0
    window: int
    penalty: str
    options: str


def weight_of(case: Case, rank: int, step: int) -> int:
    if case.weights == "with 0" and (rank, step) == (1, 1):
        return 0
    return 2 + (rank + step) % 3 if case.weights else 1


def data(case: Case, rank: int, epoch: int) -> list[Any]:
    weights = [weight_of(case, rank, step) for step in range(EPOCHS[epoch][rank])]
    return [(*batch(rank, epoch, step), torch.tensor([weight])) for step, weight in enumerate(weights)]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.05, momentum=0.9)


def steps(case: Case, optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
    """Return the optimizer step, after which every second step keeps its gradients in the case ``kept``."""

    def step(number: int) -> None:
        optimizer.step()
        if "kept" not in case.options or number % 2:
            optimizer.zero_grad()

    return step


def alone(case: Case) -> list[torch.Tensor]:
    model = Model(case.way)
    step = steps(case, optimizer_of(model))
    for epoch, counts in enumerate(EPOCHS):
        for first in range(0, max(counts), case.window):
            rows = [row for rank in range(3) for row in data(case, rank, epoch)[first : first + case.window]]
            total = sum(int(weight) for *_, weight in rows)
            if not case.weights and case.block == "plain":  # a mean over ranks of the sums of their windows
                total = sum(counts[rank] > first for rank in range(3))
            for x, y, weight in rows:
                model(x)
                (int(weight) / total * model.loss(y)).backward()
            if case.penalty:
                model.penalty().backward()
            step(first // case.window)
    return [each.detach() for each in model.parameters()]


def train(rank: int, case: Case) -> list[torch.Tensor]:
    options: dict[str, Any] = {
        name: True for name in ("find_unused_parameters", "gradient_as_bucket_view") if name in case.options
    }
    module = Model(case.way)
    ddp = DistributedDataParallel(module, **options)
    if "comm hook" in case.options:
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    optimizer = optimizer_of(module)
    step = steps(case, optimizer)
    for epoch in range(len(EPOCHS)):
        rows = data(case, rank, epoch)
        with Join([ddp, optimizer], divide_by_initial_world_size=False) as join:
            for number, (x, y, weight) in enumerate(batches(case, join, rows)):
                ends = number % case.window == case.window - 1 or number == len(rows) - 1
                if case.block != "plain":
                    ends = join.ends_window
                if case.penalty == "before" and ends:
                    module.penalty().backward()
                if case.weights and case.block == "plain":
                    join.weight = int(weight)
                with contextlib.nullcontext() if ends else ddp.no_sync():
                    output = ddp(x)
                    if case.way in SHOWN:
                        module.z = output  # with find_unused_parameters a copy, behind which DDP looks for parameters
                    if case.penalty == "between" and ends:
                        module.penalty().backward()
                    loss = module.loss(y)
                    (join.scale(loss) if scales(case) else loss).backward()
                if case.penalty == "after" and ends:
                    module.penalty().backward()
                if ends:
                    step(number // case.window)
    return [each.detach() for each in module.parameters()]


def scales(case: Case) -> bool:
    return bool(case.weights) or (case.window > 1 and case.block != "plain")


def batches(case: Case, join: Join, rows: list[Any]) -> Iterator[Any]:
    if case.block == "plain":
        return iter(rows)
    options: dict[str, Any] = {"weigh": weight_in} if case.weights else {}
    return iter(join.iterate(rows, dummy=cast("Any", case.block), window=case.window, **options))


def weight_in(row: Any) -> int:
    return int(row[2])


def is_a_case(case: Case) -> bool:
    """Return whether a single process can train the case."""
    if case.options == "find_unused_parameters" and case.way not in REACHING:
        return False
    if case.block == "plain":
        # A rank without data runs no code, so it has no penalties, and its windows end where its data does.
        return not case.penalty and case.window == 1
    # DDP reduces a penalty in the place of the loss, which is then a second backward; and that one is not scaled.
    # The second backward is not found in time if its first gradient is of a parameter that is used outside.
    return case.penalty != "between" or (case.way in SHOWN and not scales(case))


SHOWN = "outputs", "adapter", "reentrant"
REACHING = "outputs", "attribute beside outputs", "tuple with an object", "dataclass"
"""The ways in which the tensors that DDP finds in outputs reach all parameters, as it needs for unused ones."""
OPTIONS = "", "comm hook", "gradient_as_bucket_view", "find_unused_parameters", "kept"
CASES = [
    case
    for row in itertools.product(
        WAYS,
        ("plain", "empty", "last"),
        ("", "weights", "with 0"),
        (1, 2),
        ("", "before", "between", "after"),
        OPTIONS,
    )
    if is_a_case(case := Case(*row))
]


def name_of(case: Case) -> str:
    return ": ".join(str(part) for part in case if part not in ("", 1))


ALWAYS = [
    Case("attribute", "plain", "", 1, "", ""),
    Case("attribute beside outputs", "last", "", 1, "", ""),
    Case("distribution", "last", "weights", 1, "", ""),
    Case("adapter", "last", "", 1, "", ""),
    Case("attribute beside outputs, outside", "empty", "", 1, "", ""),
    Case("outputs", "empty", "", 1, "after", ""),
    Case("outputs", "last", "weights", 1, "before", "kept"),
    Case("outputs", "empty", "", 1, "between", "find_unused_parameters"),
    Case("object", "plain", "weights", 1, "", "comm hook"),
    Case("two reentrant, hidden", "last", "", 1, "", ""),
    Case("hook", "empty", "with 0", 2, "after", "gradient_as_bucket_view"),
]
"""Cases that ended wrong, or by an error, while backwards were found at outputs; and some beside them."""


@pytest.mark.parametrize("case", dict.fromkeys([*ALWAYS, *all_or_each(CASES, together=2)]), ids=name_of)
def test_as_one_process(pool: Pool, case: Case) -> None:
    expected = alone(case)
    for found in pool.run(train, case):
        torch.testing.assert_close(found, expected, atol=10 * TOLERANCE, rtol=1e-4)


class Shown:
    """The outputs of a DDP module, which its forward hides if ``hides``: it returns copies without a graph."""

    def __init__(self, ddp: DistributedDataParallel, hides: bool) -> None:
        self._ddp, self._hides, self._last = ddp, hides, torch.zeros(())
        cast("nn.Module", ddp.module).register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        self._last = output
        return output.detach() if self._hides else output

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self._ddp(x)
        return self._last


def train_two_modules(rank: int, hides: bool, iterates: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    modules = [DistributedDataParallel(nn.Linear(*sizes)) for sizes in ((FEATURES, 6), (6, 1))]
    first, second = (Shown(ddp, hides) for ddp in modules)
    parameters = [parameter for ddp in modules for parameter in ddp.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    rows = [batch(rank, 0, step)[0] for step in range((3, 5, 0)[rank])]
    with Join([*modules, optimizer], divide_by_initial_world_size=False) as join:
        for x in join.iterate(rows, dummy="last") if iterates else rows:
            optimizer.zero_grad()
            second(torch.tanh(first(x))).square().mean().backward()
            optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("iterates", [False, True])
def test_two_modules_that_hide_their_outputs(pool: Pool, iterates: bool) -> None:
    torch.testing.assert_close(
        pool.run(train_two_modules, True, iterates), pool.run(train_two_modules, False, iterates)
    )


def train_late(rank: int, hides: bool) -> list[torch.Tensor]:
    """The header of each backward is sent in the forward, and another joinable communicates before the backward."""
    ddp, counter = DistributedDataParallel(build("norm")), Counter(collective_of(None))
    outputs, optimizer = Shown(ddp, hides), torch.optim.SGD(ddp.parameters(), lr=0.05)
    with Join([ddp, counter, optimizer], divide_by_initial_world_size=False):
        for x, y in [batch(rank, 0, step) for step in range(4 - 2 * rank)]:
            optimizer.zero_grad()
            loss = (outputs(x) - y).square().mean()
            counter()
            loss.backward()
            counter()
            optimizer.step()
    return [parameter.detach() for parameter in ddp.parameters()]


def test_a_hidden_backward_after_its_burst_was_run_without_it(pool: Pool) -> None:
    torch.testing.assert_close(pool.run(train_late, True, ranks=2), pool.run(train_late, False, ranks=2))


def train_after_a_skipped_one(rank: int, hides: bool) -> list[torch.Tensor]:
    """Rank 0 makes two backwards without a reduction, after one that was announced and skipped."""
    ddp, counter = DistributedDataParallel(build("mlp")), Counter(collective_of(None))
    outputs, optimizer = Shown(ddp, hides), torch.optim.SGD(ddp.parameters(), lr=0.05)
    with Join([counter, ddp, optimizer]):
        for x, y in [batch(rank, 0, step) for step in range(3)]:
            optimizer.zero_grad()
            outputs(x)
            counter()  # which runs the announced burst
            with ddp.no_sync():
                for _ in range(2 - 2 * rank):
                    (outputs(x) - y).square().mean().backward()
            (outputs(x) - y).square().mean().backward()
            optimizer.step()
            counter()
    return [parameter.detach() for parameter in ddp.parameters()]


def test_a_hidden_backward_without_a_reduction_after_a_skipped_one(pool: Pool) -> None:
    run = partial(pool.run, train_after_a_skipped_one, ranks=2)
    torch.testing.assert_close(run(True), run(False))

"""Attributes of optimizers, wrappers and modules, EMA copies and schedules, after uneven and even blocks."""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from typing_extensions import override

from join import Join, JoinError
from joinables import steps as steps_of
from tests.harness import Pool
from tests.training import TOLERANCE, assert_same, batch, build, flat_state

EPOCHS = ((2, 5, 0), (4, 3, 6))  # numbers of batches
RANKS = 3


class Counter:
    """An object with a counter, as an optimizer may hold one, under the name of an attribute of all optimizers."""

    def __init__(self) -> None:
        self.state = 0


class Attributes(torch.optim.Optimizer):
    """Momentum and counters in attributes of many kinds; ``step`` returns nothing that it does not keep there."""

    def __init__(self, params: Any, kind: str) -> None:
        super().__init__(params, {"lr": 0.05})
        self.kind, parameters = kind, self.param_groups[0]["params"]
        zeros = [torch.zeros_like(each) for each in parameters]
        self.momentum: Any = {"list": zeros, "dict": dict(enumerate(zeros))}.get(kind)
        self.warm, self.steps, self.cycle, self.norms = True, [0], 0, deque[float](maxlen=4)
        self.nested, self.average, self.counters = Counter(), torch.zeros(()), [Counter(), Counter()]
        self.act, self.made = torch.tanh, None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        kind, parameters, factor = self.kind, self.param_groups[0]["params"], 1.0
        if kind == "later" and self.momentum is None:
            self.momentum = [torch.zeros_like(each) for each in parameters]
        self.steps[0] += 1
        self.nested.state += 1
        self.counters[1].state += 1
        self.cycle = (self.cycle + 1) % 5  # the rank with the most batches ends where it began
        if kind == "flag":
            factor, self.warm = (0.1 if self.warm else 1.0), self.steps[0] < 4
        elif kind == "cycle":
            factor = 1 / (1 + self.cycle)
        elif kind in ("nested", "nested in a list"):
            factor = 1 / (self.nested.state if kind == "nested" else self.counters[1].state)
        elif kind == "history":
            self.norms.append(float(torch.stack([each.grad.norm() for each in parameters]).norm()))
            factor = sum(self.norms) / len(self.norms) / (1 + self.norms[-1])
        elif kind == "tensor":
            self.average.mul_(0.5).add_(parameters[0].grad.square().sum())
            factor = float(1 / (1 + self.average))
        elif kind == "keyed":
            states: Any = self.state
            self.momentum = states.setdefault("all", {})
        elif kind == "made":
            self.made = self.made or Counter()
            self.made.state += 1
            factor = 1 / self.made.state
        for index, each in enumerate(parameters):
            gradient = each.grad
            if kind in ("list", "dict", "later"):
                gradient = self.momentum[index].mul_(0.9).add_(gradient)
            elif kind == "keyed":
                gradient = self.momentum.setdefault(each, torch.zeros_like(each)).mul_(0.9).add_(gradient)
            each.sub_(gradient, alpha=0.05 * factor)


KINDS = [
    "list", "dict", "later", "flag", "cycle", "nested", "nested in a list", "history", "tensor", "keyed", "made",
]  # fmt: skip


def loop(join: Join, data: list[Any], way: str) -> Iterable[Any]:
    if way == "iterate":
        return join.iterate(data)
    return join.iterate(data, lookahead=0) if way == "lookahead=0" else data


def train(rank: int, model: torch.nn.Module, listed: list[Any], way: str, step: Callable[[], object]) -> Any:
    ddp = DistributedDataParallel(model)
    for epoch, counts in enumerate(EPOCHS):
        with Join([ddp, *listed], divide_by_initial_world_size=False) as join:
            for x, y in loop(join, [batch(rank, epoch, each) for each in range(counts[rank])], way):
                model.zero_grad()
                (ddp(x) - y).square().mean().backward()
                step()
    return flat_state(dict(model.named_parameters()))


def alone(model: torch.nn.Module, step: Callable[[], object]) -> Any:
    for epoch, counts in enumerate(EPOCHS):
        for number in range(max(counts)):
            data = [batch(rank, epoch, number) for rank in range(RANKS) if counts[rank] > number]
            model.zero_grad()
            outputs = model(torch.cat([x for x, _ in data])).split([len(x) for x, _ in data])
            loss: Any = sum((out - y).square().mean() for out, (_, y) in zip(outputs, data, strict=True))
            (loss / len(data)).backward()
            step()
    return flat_state(dict(model.named_parameters()))


def with_attributes(rank: int, kind: str, way: str) -> Any:
    model = build("mlp")
    optimizer = Attributes(model.parameters(), kind)
    nested = optimizer.nested
    state = train(rank, model, [optimizer], way, optimizer.step)
    assert optimizer.nested is nested
    assert optimizer.steps == [optimizer.nested.state] == [11]
    return state


@pytest.mark.parametrize(
    ("kind", "way"), [*product(KINDS, ["plain"]), *product(KINDS[::4], ["iterate", "lookahead=0"])]
)
def test_attributes_of_optimizers(pool: Pool, kind: str, way: str) -> None:
    model = build("mlp")
    expected = alone(model, Attributes(model.parameters(), kind).step)
    for state in pool.run(with_attributes, kind, way, ranks=RANKS):
        assert_same(state, expected, TOLERANCE)


# -- modules ----------------------------------------------------------------------------------------------------------


class Counts(torch.nn.Module):
    """It counts its forwards, in an attribute, which may be extra state; an empty batch may be refused."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind, self.count = build("mlp"), kind, 0
        self.hidden = {"count": 0}

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count, self.hidden = self.count + 1, {"count": self.hidden["count"] + 1}
        return self.inner(x) / (1 + 0.3 * (self.hidden["count"] if self.kind == "extra" else self.count))


class Extra(Counts):
    @override
    def get_extra_state(self) -> Any:
        return self.hidden

    @override
    def set_extra_state(self, state: Any) -> None:
        self.hidden = state


def counted(rank: int, kind: str, way: str) -> Any:
    model = (Extra if kind == "extra" else Counts)(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train(rank, model, [optimizer], way, optimizer.step)


@pytest.mark.parametrize("way", ["plain", "iterate"])
@pytest.mark.parametrize("kind", ["extra", "attribute"])
def test_counters_of_modules(pool: Pool, kind: str, way: str) -> None:
    model = (Extra if kind == "extra" else Counts)(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = alone(model, optimizer.step)
    for state in pool.run(counted, kind, way, ranks=RANKS):
        assert_same(state, expected, TOLERANCE)


# -- what each rank has for itself ------------------------------------------------------------------------------------


class Timed(torch.optim.SGD):
    """It sums the time of its steps, counts the samples of its rank, and holds a lock."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.seconds, self.samples, self.lock = 0.0, 0, threading.Lock()

    @override
    def step(self, closure: Any = None) -> Any:
        started = time.perf_counter()
        super().step(closure)
        self.seconds += time.perf_counter() - started + 1e-3 * (1 + dist.get_rank())
        self.samples += 5 + dist.get_rank()


def timed(rank: int, own: list[str], counts: tuple[int, ...]) -> tuple[list[str], int, list[str]]:
    ddp = DistributedDataParallel(build("mlp"))
    optimizer = Timed(ddp.parameters())
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("join").addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(2):
            with Join([ddp, optimizer], own_attributes=own):
                for step in range(counts[rank]):
                    ddp(batch(rank, epoch, step)[0]).sum().backward()
                    optimizer.step()
    logging.getLogger("join").removeHandler(handler)
    files = {each.filename for each in caught}
    assert files <= {__file__}
    return [str(each.message) for each in caught], optimizer.samples, logged


def test_attributes_that_each_rank_has_for_itself(pool: Pool) -> None:
    """One warning in an even block, which names them and what to write; none with it, and nothing is copied then."""
    results = pool.run(timed, [], (2, 2, 2), ranks=RANKS)
    for rank, (texts, samples, logged) in enumerate(results):
        (text,) = texts
        assert "Timed.seconds is now" in text
        assert "Timed.samples is now 10 on rank 0, 12 on rank 1, 14 on rank 2" in text
        assert "own_attributes=['samples', 'seconds']" in text
        assert samples == 2 * 2 * (5 + rank)
        assert len([each for each in logged if "Timed.lock" in each]) == 1
    for counts in ((2, 2, 2), (1, 3, 0)):
        for rank, (texts, samples, _) in enumerate(pool.run(timed, ["seconds", "samples"], counts, ranks=RANKS)):
            assert texts == []
            assert samples == 2 * counts[rank] * (5 + rank)


# -- EMA copies -------------------------------------------------------------------------------------------------------


class Shadow:
    """An EMA copy with a state_dict."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.copies = [each.detach().clone() for each in parameters]

    def update_parameters(self, model: torch.nn.Module) -> None:
        for own, each in zip(self.copies, model.parameters(), strict=True):
            own.lerp_(each.detach(), 0.5)

    def state_dict(self) -> Any:
        return {"copies": self.copies}

    def load_state_dict(self, state: Any) -> None:
        self.copies = state["copies"]


def averages(rank: int, kind: str, way: str, skips: bool, differs: bool) -> str:
    ddp = DistributedDataParallel(build("mlp"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    average: Any = Shadow(ddp.module.parameters()) if kind == "shadow" else AveragedModel(ddp.module)
    if differs:
        with torch.no_grad():
            for each in average.copies if kind == "shadow" else average.parameters():
                each.mul_(1 + rank)
    try:
        with Join([ddp, optimizer, average], divide_by_initial_world_size=False) as join:
            data = [batch(rank, 0, each) for each in range((1, 3, 0)[rank] if way == "iterate" else 2)]
            for x, y in loop(join, data, way):
                optimizer.zero_grad()
                (ddp(x) - y).square().mean().backward()
                optimizer.step()
                if not (skips and (join.shadowing if way == "iterate" else rank)):
                    average.update_parameters(ddp.module)
    except JoinError as error:
        return str(error)
    return "fine"


@pytest.mark.parametrize("kind", ["shadow", "module"])
@pytest.mark.parametrize("way", ["plain", "iterate"])
@pytest.mark.parametrize(("skips", "differs"), [(True, False), (False, False), (True, True)])
def test_averages_that_only_some_ranks_update(pool: Pool, kind: str, way: str, skips: bool, differs: bool) -> None:
    """An error, unless they differed before."""
    name = "state of Shadow" if kind == "shadow" else "parameters of AveragedModel"
    for text in pool.run(averages, kind, way, skips, differs, ranks=RANKS):
        assert f"of the {name} is" in text if skips and not differs else text == "fine"


# -- schedules --------------------------------------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[Any, int], Any]] = {
    "cosine": lambda optimizer, total: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total),
    "one cycle": lambda optimizer, total: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total),
    "closure": lambda optimizer, total: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: max(0, 1 - k / total)),
    "linear": lambda optimizer, total: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total),
}


def scheduled(rank: int, kind: str, zero: bool, by_steps: bool) -> str:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    data = [batch(rank, 0, each) for each in range((3, 7, 2)[rank])]
    ddp = DistributedDataParallel(build("mlp"))
    optimizer: Any = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    if zero:
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    schedule = SCHEDULES[kind](optimizer, 2 * (steps_of(data) if by_steps else len(data)))
    try:
        for _ in range(2):
            with Join([ddp, optimizer, schedule], divide_by_initial_world_size=False):
                for x, y in data:
                    optimizer.zero_grad()
                    (ddp(x) - y).square().mean().backward()
                    optimizer.step()
                    schedule.step()
    except JoinError as error:
        return str(error)
    return "fine"


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedules_from_the_length_of_each_rank(pool: Pool, kind: str, zero: bool) -> None:
    texts = pool.run(scheduled, kind, zero, False, ranks=RANKS)
    assert len(set(texts)) == 1
    assert "J441" in texts[0] and "joinables.steps(loader)" in texts[0]
    if kind == "closure":
        assert "the learning rate in step 3 of the block of" in texts[0]
        assert "on rank 0, 0.0857" in texts[0]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedules_from_the_steps_of_all_ranks(pool: Pool, kind: str) -> None:
    assert pool.run(scheduled, kind, False, True, ranks=RANKS) == ["fine"] * RANKS


# -- what an attribute may be -----------------------------------------------------------------------------------------


class OddConfig:
    """An object that raises an unusual error for an attribute that it lacks."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class Pair(tuple[int, int]):
    """A tuple that can be pickled, and not unpickled."""

    __slots__ = ()

    def __new__(cls, first: int, second: int) -> Pair:
        return super().__new__(cls, (first, second))


class Slotted:
    """A wrapper of an optimizer without a dict of attributes."""

    __slots__ = ("optimizer",)

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)


def _plain_block(optimizer: Any, data: list[torch.Tensor], step: Callable[[torch.Tensor], object]) -> None:
    """Train with SGD, whose attributes are set before, and by ``step`` after each batch."""
    model: Any = optimizer.model[0]
    with Join([model, optimizer]):
        for x in data:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            step(x)


def _with_model() -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2)
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.model = [DistributedDataParallel(module)]
    return module, optimizer


def odd_attributes(rank: int) -> dict[str, Any]:
    """Ranks 0 and 1 have 2 and 4 batches."""
    module, optimizer = _with_model()
    # On entering, these differ.
    optimizer.private, optimizer.large = torch.zeros(2).add_(rank), [rank] * 100_000
    # These are equal, and other code has them, too.
    history, generator = list[int](), torch.Generator().manual_seed(3)
    optimizer.history, optimizer.generator, optimizer.groups = [history], generator, optimizer.param_groups
    optimizer.table, optimizer.space, optimizer.call = {module: 1}, SimpleNamespace(of=module), partial(id, module)
    vars(optimizer).update(config=OddConfig(), pair=None, ids=None, last=None)
    optimizer.wide, optimizer.turned = torch.ones(1).expand(3), torch.ones(2, dtype=torch.complex64).conj()
    data = list(torch.arange(1.0, 1 + 4 * 12).reshape(4, 4, 3)[: 2 + 2 * rank] * (rank + 1))
    copies = [x.clone() for x in data]

    def step(x: torch.Tensor) -> None:
        history.append(len(history))
        torch.rand(1, generator=generator)
        optimizer.large, optimizer.pair, optimizer.last = [rank], Pair(rank, 1), x
        optimizer.ids = [id(each) for each in module.parameters()]

    _plain_block(optimizer, data, step)
    _plain_block(optimizer, data[:2], lambda _: None)
    return {
        "differed on entering": [optimizer.private.tolist(), optimizer.large, tuple(optimizer.pair)],
        "history": history,
        "drawn": torch.rand(1, generator=generator).item(),
        "last": optimizer.last.tolist(),
        "same objects": [
            optimizer.history[0] is history,
            optimizer.generator is generator,
            optimizer.groups is optimizer.param_groups,
            list(optimizer.table) == [module],
            optimizer.space.of is module,
            optimizer.call.args == (module,),
            optimizer.ids == [id(each) for each in module.parameters()],
            all(map(torch.equal, data, copies)),
        ],
    }


def test_attributes_that_are_left_alone_or_shared(pool: Pool) -> None:
    first, second = pool.run(odd_attributes, ranks=2)
    assert first.pop("differed on entering") == [[0.0, 0.0], [0], (0, 1)]
    assert second.pop("differed on entering") == [[1.0, 1.0], [1], (1, 1)]
    assert first["history"] == [0, 1, 2, 3]
    assert all(first["same objects"])
    assert first == second


class Uncalibrated(torch.nn.Linear):
    """A module whose extra state cannot be read."""

    @override
    def get_extra_state(self) -> Any:
        raise RuntimeError

    @override
    def set_extra_state(self, state: Any) -> None:
        raise RuntimeError


def sets_and_slots(rank: int) -> None:
    module, optimizer = _with_model()
    optimizer.seen, optimizer.ids = {"names": set[str]()}, None

    def step(_: torch.Tensor) -> None:
        names = "abcdefgh" if rank else "hgfedcba"
        optimizer.seen = {"names": {name * 8 for name in names}}
        optimizer.ids = {id(each) for each in module.parameters()}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _plain_block(optimizer, [torch.ones(4, 3)], step)
    odd: Any = DistributedDataParallel(Uncalibrated(3, 2))
    with Join([odd, Slotted(torch.optim.SGD(odd.parameters(), lr=0.1))]):
        odd(torch.ones(1, 3)).sum().backward()


def test_sets_ids_and_objects_without_a_dict_or_extra_state(pool: Pool) -> None:
    pool.run(sets_and_slots, ranks=2)

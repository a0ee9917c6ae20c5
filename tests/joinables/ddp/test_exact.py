"""On uneven inputs, DDP, ZeRO and optimizers equal one process on the same batches, and each other bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from tests.harness import ALL, Parts, Pool, all_or_each, parts_in
from tests.training import DDP, Case, Data, Loop, Model, Optimizer, Step, check, shorter

CASES = {
    "sgd with momentum": Case(optimizer=Optimizer("sgd")),
    "sgd, initial world size": Case(optimizer=Optimizer("sgd"), step=Step(initial=True)),
    "adam": Case(),
    "adam, initial world size": Case(step=Step(initial=True)),
    "adamw with clipping": Case(optimizer=Optimizer("adamw"), step=Step(clip=True)),
    "zero over sgd": Case(optimizer=Optimizer("sgd", zero=True)),
    "zero over adam": Case(optimizer=Optimizer(zero=True)),
    "zero over adam, initial world size": Case(optimizer=Optimizer(zero=True), step=Step(initial=True)),
    "zero with clipping": Case(optimizer=Optimizer("adamw", zero=True), step=Step(clip=True)),
    "gradient_as_bucket_view": Case(wrapper=DDP({"gradient_as_bucket_view": True})),
    "gradient_as_bucket_view, zero": Case(
        wrapper=DDP({"gradient_as_bucket_view": True}), optimizer=Optimizer(zero=True)
    ),
    "tiny buckets": Case(wrapper=DDP({"bucket_cap_mb": 1e-5})),
    "tiny buckets, zero": Case(wrapper=DDP({"bucket_cap_mb": 1e-5}), optimizer=Optimizer(zero=True)),
    "static_graph": Case(wrapper=DDP({"static_graph": True})),
    "static_graph, zero, tiny buckets": Case(
        wrapper=DDP({"static_graph": True, "bucket_cap_mb": 1e-5}), optimizer=Optimizer(zero=True)
    ),
    "find_unused_parameters": Case(Model("branches"), wrapper=DDP({"find_unused_parameters": True})),
    "find_unused_parameters, zero": Case(
        Model("branches"), wrapper=DDP({"find_unused_parameters": True}), optimizer=Optimizer(zero=True)
    ),
    "find_unused_parameters, views": Case(
        Model("branches"), wrapper=DDP({"find_unused_parameters": True, "gradient_as_bucket_view": True})
    ),
    "find_unused_parameters, accumulation": Case(
        Model("branches"),
        wrapper=DDP({"find_unused_parameters": True, "bucket_cap_mb": 1e-5}),
        optimizer=Optimizer("sgd"),
        data=Data(((1, 5, 0), (2, 0, 1), (5, 0, 3))),
        step=Step(accumulate=3, initial=True),
    ),
    "find_unused_parameters, accumulation, mean over contributors": Case(
        Model("branches"),
        wrapper=DDP({"find_unused_parameters": True}),
        data=Data(((2, 4, 5), (0, 5, 2), (3, 0, 5))),
        step=Step(accumulate=2),
    ),
    "allreduce hook": Case(wrapper=DDP(hook="allreduce")),
    "compiled": Case(Model(compiled=True)),
    "tuple": Case(Model("tuple")),
    "dict": Case(Model("dict")),
    "dataclass": Case(Model("dataclass")),
    "an object of one's own": Case(Model("opaque")),
    "an object of one's own, initial": Case(Model("opaque"), step=Step(initial=True)),
    "frozen parameters": Case(Model("frozen")),
    "frozen parameters, zero, views": Case(
        Model("frozen"), wrapper=DDP({"gradient_as_bucket_view": True}), optimizer=Optimizer(zero=True)
    ),
    "frozen parameters, static_graph, initial": Case(
        Model("frozen"), wrapper=DDP({"static_graph": True}), step=Step(initial=True)
    ),
    "integer learning rate, zero": Case(
        optimizer=Optimizer("sgd", zero=True, rate=1), data=Data(((0, 2, 1), (1, 0, 1), (0, 1, 0)))
    ),
    "batch norm": Case(Model("norm")),
    "batch norm, zero, initial": Case(Model("norm"), optimizer=Optimizer(zero=True), step=Step(initial=True)),
    "batch norm, leaders leave in turn": Case(Model("norm"), data=Data(((1, 2, 4), (0, 3, 5), (2, 4, 3)))),
    "accumulation": Case(data=Data(((4, 2, 0), (3, 6, 1), (0, 5, 4))), step=Step(accumulate=2)),
    "accumulation, initial": Case(data=Data(((4, 2, 0), (3, 6, 1), (0, 5, 4))), step=Step(accumulate=2, initial=True)),
    "accumulation, zero": Case(
        optimizer=Optimizer(zero=True), data=Data(((6, 4, 0), (3, 9, 5), (1, 6, 2))), step=Step(accumulate=3)
    ),
    "accumulation, views": Case(
        wrapper=DDP({"gradient_as_bucket_view": True}),
        data=Data(((4, 2, 0), (3, 6, 1), (0, 5, 4))),
        step=Step(accumulate=2),
    ),
    "batch norm, accumulation": Case(
        Model("norm"), data=Data(((4, 2, 0), (6, 3, 1), (4, 0, 3))), step=Step(accumulate=2, initial=True)
    ),
    "zero_grad keeps tensors": Case(step=Step(to_none=False)),
    "zero_grad keeps tensors, zero": Case(optimizer=Optimizer(zero=True), step=Step(to_none=False)),
    "zero_grad keeps tensors, initial": Case(optimizer=Optimizer("sgd"), step=Step(to_none=False, initial=True)),
    "zero_grad keeps tensors, accumulation": Case(
        optimizer=Optimizer("sgd"),
        data=Data(((2, 4, 4), (2, 2, 4), (0, 2, 4))),
        step=Step(accumulate=2, to_none=False, initial=True),
    ),
    "zero_grad keeps tensors, accumulation, batch norm": Case(
        Model("norm"),
        optimizer=Optimizer("sgd"),
        data=Data(((3, 2, 5), (6, 0, 0), (6, 0, 3))),
        step=Step(accumulate=3, to_none=False),
    ),
    "zero_grad keeps tensors, batch norm, initial": Case(Model("norm"), step=Step(to_none=False, initial=True)),
    "weights, accumulation, zero": Case(
        optimizer=Optimizer(zero=True),
        data=Data(((6, 4, 0), (3, 9, 5), (1, 6, 2)), weighted=True),
        step=Step(accumulate=3),
    ),
    "weights, batch norm, leaders leave in turn": Case(
        Model("norm"), data=Data(((1, 2, 4), (0, 3, 5), (2, 4, 3)), weighted=True)
    ),
    "weights, find_unused_parameters": Case(
        Model("branches"),
        wrapper=DDP({"find_unused_parameters": True, "gradient_as_bucket_view": True}),
        data=Data(weighted=True),
    ),
    "weights, static_graph, tiny buckets": Case(
        wrapper=DDP({"static_graph": True, "bucket_cap_mb": 1e-5}), data=Data(weighted=True)
    ),
    "weights, an object of one's own": Case(Model("opaque"), data=Data(weighted=True)),
    "weights, tuple, compiled": Case(Model("tuple", compiled=True), data=Data(weighted=True)),
    "weights, frozen parameters, clipping": Case(Model("frozen"), data=Data(weighted=True), step=Step(clip=True)),
    "weights, allreduce hook": Case(wrapper=DDP(hook="allreduce"), data=Data(weighted=True)),
    "loss divided, accumulation": Case(
        data=Data(((6, 4, 0), (3, 9, 5), (1, 6, 2))), step=Step(divided=True, accumulate=3)
    ),
    "loss divided, weights, zero": Case(
        optimizer=Optimizer(zero=True),
        data=Data(((4, 2, 0), (3, 6, 1), (0, 5, 4)), weighted=True),
        step=Step(divided=True, accumulate=2),
    ),
    "loss divided, batch norm, views, allreduce hook": Case(
        Model("norm"),
        wrapper=DDP({"gradient_as_bucket_view": True}, hook="allreduce"),
        data=Data(((4, 2, 0), (6, 3, 1), (4, 0, 3))),
        step=Step(divided=True, accumulate=2),
    ),
    "even": Case(data=Data(((2, 2, 2), (3, 3, 3), (1, 1, 1)))),
    "nothing at all": Case(data=Data(((0, 0, 0), (0, 2, 0), (0, 0, 0)))),
}


def parts_of_case(name: str) -> Parts:
    return parts_in(CASES[name])


SOME = [name for name, case in CASES.items() if ALL or not case.model.compiled]  # to compile takes seconds


@pytest.mark.parametrize("name", all_or_each(SOME, parts_of_case))
def test_equals_one_process(pool: Pool, name: str) -> None:
    check(pool, shorter(CASES[name]))


# Where dummies have samples of their own, or windows end between them.
OTHERWISE = [
    "adamw with clipping",
    "zero over adam, initial world size",
    "find_unused_parameters, accumulation",
    "batch norm, accumulation",
    "zero_grad keeps tensors, initial",
    "weights, accumulation, zero",
    "weights, find_unused_parameters",
    "nothing at all",
]


def weighted(case: Case) -> Case:
    return replace(case, data=replace(case.data, weighted=True))


def over(loop: Loop) -> Callable[[Case], Case]:
    return lambda case: replace(case, loop=loop)


WAYS: dict[str, tuple[Callable[[Case], Case], list[str]]] = {
    "weights": (weighted, [name for name, case in CASES.items() if weighted(case) not in CASES.values()]),
    "lockstep": (over(Loop(iterate="empty")), list(CASES)),
    "lockstep, last": (over(Loop(iterate="last")), OTHERWISE),
    "lockstep, a function": (over(Loop(iterate="a function")), OTHERWISE),
    "lockstep, ahead": (over(Loop(iterate="empty", lookahead=2)), OTHERWISE),
}
"""Ways to train, beside a plain block, and the cases that can be trained so."""


class Row(NamedTuple):
    """A case, a way to train it, and whether headers go over the group."""

    name: str
    way: str
    over_group: bool

    @property
    def case(self) -> Case:
        case = CASES[self.name]
        return WAYS[self.way][0](case) if self.way else case

    def __str__(self) -> str:
        return f"{self.name}: {self.way or 'block'}{', over the group' if self.over_group else ''}"


ROWS = [Row(name, way, False) for way, (_, names) in WAYS.items() for name in names] + [
    Row(name, way, True) for name in OTHERWISE for way in ("", "lockstep")
]


def parts_of(row: Row) -> dict[str, Any]:
    """How it is trained, and what of the case matters there."""
    case = row.case
    assert isinstance(case.wrapper, DDP)
    return {
        "model": case.model.kind,
        "zero": case.optimizer.zero,
        "accumulate": case.step.accumulate,
        "ddp": tuple(sorted(case.wrapper.options)),
        "way": row.way,
        "over the group": row.over_group,
    }


@pytest.mark.parametrize("row", all_or_each(ROWS, parts_of, together=2), ids=str)
def test_equals_one_process_in_another_way(pool: Pool, row: Row) -> None:
    check(pool, shorter(row.case), over_group=row.over_group)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("zero with clipping", "block"),
        ("batch norm, leaders leave in turn", "block"),
        ("zero_grad keeps tensors, initial", "block"),
        ("accumulation, views", "weights"),
        ("find_unused_parameters, zero", "lockstep"),
    ],
)
def test_one_join_is_entered_for_each_epoch(pool: Pool, name: str, way: str) -> None:
    case = CASES[name] if way == "block" else WAYS[way][0](CASES[name])
    check(pool, shorter(replace(case, loop=replace(case.loop, one_join=True))))

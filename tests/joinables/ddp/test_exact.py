"""On uneven inputs, DDP, ZeRO and optimizers equal one process on the same batches, and each other bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from tests.pool import Pool
from tests.selection import all_or_some
from tests.training import Case, check

CASES = {
    "sgd with momentum": Case(optimizer="sgd"),
    "sgd, initial world size": Case(optimizer="sgd", initial=True),
    "adam": Case(),
    "adam, initial world size": Case(initial=True),
    "adamw with clipping": Case(optimizer="adamw", clip=True),
    "zero over sgd": Case(optimizer="sgd", zero=True),
    "zero over adam": Case(zero=True),
    "zero over adam, initial world size": Case(zero=True, initial=True),
    "zero with clipping": Case(optimizer="adamw", zero=True, clip=True),
    "gradient_as_bucket_view": Case(ddp={"gradient_as_bucket_view": True}),
    "gradient_as_bucket_view, zero": Case(zero=True, ddp={"gradient_as_bucket_view": True}),
    "tiny buckets": Case(ddp={"bucket_cap_mb": 1e-5}),
    "tiny buckets, zero": Case(zero=True, ddp={"bucket_cap_mb": 1e-5}),
    "static_graph": Case(ddp={"static_graph": True}),
    "static_graph, zero, tiny buckets": Case(zero=True, ddp={"static_graph": True, "bucket_cap_mb": 1e-5}),
    "find_unused_parameters": Case(model="branches", ddp={"find_unused_parameters": True}),
    "find_unused_parameters, zero": Case(model="branches", zero=True, ddp={"find_unused_parameters": True}),
    "find_unused_parameters, views": Case(
        model="branches", ddp={"find_unused_parameters": True, "gradient_as_bucket_view": True}
    ),
    "find_unused_parameters, accumulation": Case(
        model="branches",
        accumulate=3,
        initial=True,
        optimizer="sgd",
        ddp={"find_unused_parameters": True, "bucket_cap_mb": 1e-5},
        counts=((1, 5, 0), (2, 0, 1), (5, 0, 3)),
    ),
    "find_unused_parameters, accumulation, mean over contributors": Case(
        model="branches",
        accumulate=2,
        ddp={"find_unused_parameters": True},
        counts=((2, 4, 5), (0, 5, 2), (3, 0, 5)),
    ),
    "allreduce hook": Case(hook="allreduce"),
    "compiled": Case(compiled=True),
    "tuple": Case(model="tuple"),
    "dict": Case(model="dict"),
    "dataclass": Case(model="dataclass"),
    "an object of one's own": Case(model="opaque"),
    "an object of one's own, initial": Case(model="opaque", initial=True),
    "frozen parameters": Case(model="frozen"),
    "frozen parameters, zero, views": Case(model="frozen", zero=True, ddp={"gradient_as_bucket_view": True}),
    "frozen parameters, static_graph, initial": Case(model="frozen", initial=True, ddp={"static_graph": True}),
    "integer learning rate, zero": Case(optimizer="sgd", zero=True, rate=1, counts=((0, 2, 1), (1, 0, 1), (0, 1, 0))),
    "batch norm": Case(model="norm"),
    "batch norm, zero, initial": Case(model="norm", zero=True, initial=True),
    "batch norm, leaders leave in turn": Case(model="norm", counts=((1, 2, 4), (0, 3, 5), (2, 4, 3))),
    "accumulation": Case(accumulate=2, counts=((4, 2, 0), (3, 6, 1), (0, 5, 4))),
    "accumulation, initial": Case(accumulate=2, initial=True, counts=((4, 2, 0), (3, 6, 1), (0, 5, 4))),
    "accumulation, zero": Case(accumulate=3, zero=True, counts=((6, 4, 0), (3, 9, 5), (1, 6, 2))),
    "accumulation, views": Case(
        accumulate=2, counts=((4, 2, 0), (3, 6, 1), (0, 5, 4)), ddp={"gradient_as_bucket_view": True}
    ),
    "batch norm, accumulation": Case(
        model="norm", accumulate=2, initial=True, counts=((4, 2, 0), (6, 3, 1), (4, 0, 3))
    ),
    "zero_grad keeps tensors": Case(to_none=False),
    "zero_grad keeps tensors, zero": Case(to_none=False, zero=True),
    "zero_grad keeps tensors, initial": Case(to_none=False, initial=True, optimizer="sgd"),
    "zero_grad keeps tensors, accumulation": Case(
        accumulate=2, to_none=False, initial=True, optimizer="sgd", counts=((2, 4, 4), (2, 2, 4), (0, 2, 4))
    ),
    "zero_grad keeps tensors, accumulation, batch norm": Case(
        model="norm", accumulate=3, to_none=False, optimizer="sgd", counts=((3, 2, 5), (6, 0, 0), (6, 0, 3))
    ),
    "zero_grad keeps tensors, batch norm, initial": Case(model="norm", to_none=False, initial=True),
    "weights, accumulation, zero": Case(
        weighted=True, accumulate=3, zero=True, counts=((6, 4, 0), (3, 9, 5), (1, 6, 2))
    ),
    "weights, batch norm, leaders leave in turn": Case(
        weighted=True, model="norm", counts=((1, 2, 4), (0, 3, 5), (2, 4, 3))
    ),
    "weights, find_unused_parameters": Case(
        weighted=True, model="branches", ddp={"find_unused_parameters": True, "gradient_as_bucket_view": True}
    ),
    "weights, static_graph, tiny buckets": Case(weighted=True, ddp={"static_graph": True, "bucket_cap_mb": 1e-5}),
    "weights, an object of one's own": Case(weighted=True, model="opaque"),
    "weights, tuple, compiled": Case(weighted=True, model="tuple", compiled=True),
    "weights, frozen parameters, clipping": Case(weighted=True, model="frozen", clip=True),
    "weights, allreduce hook": Case(weighted=True, hook="allreduce"),
    "loss divided, accumulation": Case(divided=True, accumulate=3, counts=((6, 4, 0), (3, 9, 5), (1, 6, 2))),
    "loss divided, weights, zero": Case(
        divided=True, weighted=True, accumulate=2, zero=True, counts=((4, 2, 0), (3, 6, 1), (0, 5, 4))
    ),
    "loss divided, batch norm, views, allreduce hook": Case(
        divided=True,
        model="norm",
        accumulate=2,
        hook="allreduce",
        counts=((4, 2, 0), (6, 3, 1), (4, 0, 3)),
        ddp={"gradient_as_bucket_view": True},
    ),
    "even": Case(counts=((2, 2, 2), (3, 3, 3), (1, 1, 1))),
    "nothing at all": Case(counts=((0, 0, 0), (0, 2, 0), (0, 0, 0))),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(pool: Pool, name: str) -> None:
    check(pool, CASES[name])


# Ranks without data replay. Not weights, which cannot be applied where ranks may compute together, and where nobody can
# look for tensors. A branch that is replayed counts as used, and forwards of a window that is never stepped count for
# buffers.
REPLAYED = [
    name
    for name, case in CASES.items()
    if not (case.weighted or case.divided or case.model in ("opaque", "branches"))
    and name != "zero_grad keeps tensors, accumulation, batch norm"
]
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
WAYS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "weights": ({"weighted": True}, [name for name, case in CASES.items() if not case.weighted]),
    # Not those where gradients are kept, whose steps cannot be declared.
    "declared": ({"declared": True}, [name for name, case in CASES.items() if case.to_none or not case.initial]),
    "replay": ({"replay": True}, REPLAYED),
    "lockstep": ({"iterate": "empty"}, list(CASES)),
    "lockstep, last": ({"iterate": "last"}, OTHERWISE),
    "lockstep, a function": ({"iterate": "a function"}, OTHERWISE),
    "lockstep, declared": ({"iterate": "empty", "declared": True}, OTHERWISE),
    "lockstep, ahead": ({"iterate": "empty", "lookahead": 2}, OTHERWISE),
}
"""Ways to train, beside a plain block, and the cases that can be trained so."""


class Row(NamedTuple):
    """A case, a way to train it, and whether headers go over the group."""

    name: str
    way: str
    over_group: bool

    @property
    def case(self) -> Case:
        return replace(CASES[self.name], **(WAYS[self.way][0] if self.way else {}))

    def __str__(self) -> str:
        return f"{self.name}: {self.way or 'block'}{', over the group' if self.over_group else ''}"


ROWS = [Row(name, way, False) for way, (_, names) in WAYS.items() for name in names] + [
    Row(name, way, True)
    for name in OTHERWISE
    for way in ("", "replay", "lockstep")
    if way != "replay" or name in REPLAYED
]


def parts_of(row: Row) -> dict[str, Any]:
    """How it is trained, and what of the case matters there."""
    case = row.case
    parts = {"model": case.model, "zero": case.zero, "accumulate": case.accumulate, "ddp": tuple(sorted(case.ddp))}
    return {**parts, "way": row.way, "over the group": row.over_group}


@pytest.mark.parametrize("row", all_or_some(ROWS, parts_of), ids=str)
def test_equals_one_process_in_another_way(pool: Pool, row: Row) -> None:
    check(pool, row.case, over_group=row.over_group)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("zero with clipping", "block"),
        ("batch norm, leaders leave in turn", "block"),
        ("zero_grad keeps tensors, initial", "block"),
        ("accumulation, views", "weights"),
        ("zero over adam", "replay"),
        ("find_unused_parameters, zero", "lockstep"),
    ],
)
def test_one_join_is_entered_for_each_epoch(pool: Pool, name: str, way: str) -> None:
    options = {} if way == "block" else WAYS[way][0]
    check(pool, replace(CASES[name], one_join=True, **options))

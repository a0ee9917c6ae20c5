"""What was equal on entering is equal on leaving: values as bytes, and what is compared, on threads."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from join.collectives import ThreadCollective, run_threads
from join.errors import ProtocolError
from join.held import Held, Part, pack_attribute
from join.transfer import Packed, Unfit, copy_state, numbered, pack, unpack


class Thing:
    """An object with attributes."""

    n: Any
    names: Any
    momentum: Any
    new: Any

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


def held(thing: Thing, collective: ThreadCollective, own: tuple[str, ...] = ()) -> Held:
    return Held(lambda: [Part("Thing", dict(vars(thing)), vars(thing).update)], own, collective)


def test_tensors_and_parameters_of_another_rank() -> None:
    """A pickle refers to parameters, even as keys; tensors stay aside; a tensor at two places remains one."""
    ours, theirs, momentum = torch.ones(2), torch.zeros(2), torch.full((2,), 3.0)
    value = {"all": {ours: [momentum, momentum]}, "queue": deque([1, 2], maxlen=2)}
    data, tensors = pack(value, numbered([ours]))
    received = unpack(Packed(data, [torch.ones(1)]), [theirs])
    assert [each is momentum for each in tensors] == [True]
    ((key, (first, second)),) = received["all"].items()
    assert key is theirs
    assert first is second
    assert received["queue"].maxlen == 2


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ([0.0] * 10**6, "more than 1 MiB"),
        ({"a": {"b": "x" * 2**21}}, "more than 1 MiB"),
        (threading.Lock(), "cannot pickle"),
        ([threading.Thread(target=print).start], "it holds a method"),
        (torch.eye(2).to_sparse(), "which is not a plain tensor"),
    ],
)
def test_values_that_are_unfit(value: Any, why: str) -> None:
    with pytest.raises(Unfit, match=why):
        pack_attribute(value)


class Large:
    """It would take long to pickle."""

    def __init__(self) -> None:
        self.pickled = 0

    def __reduce__(self) -> Any:
        self.pickled += 1
        return (Large, ())


def test_a_large_value_is_not_read_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    element = Large()
    thing = Thing(history=[element] * 10**6, k=1)

    def rank_main(collective: ThreadCollective) -> int:
        for _ in range(3):
            before = held(thing, collective)
            assert before.digest_of_changes() == 0
        return element.pickled

    with caplog.at_level(logging.WARNING, logger="join"):
        assert run_threads(1, rank_main) == [0]
    (record,) = caplog.records
    assert "Thing.history" in record.getMessage()


Change = Callable[[Thing, int], None]


def compared(values: Mapping[str, Any], change: Change, own: tuple[str, ...] = ()) -> list[str]:
    """Return the warning on each of two ranks, whose things change; "" without one."""

    def rank_main(collective: ThreadCollective) -> str:
        thing = Thing(**{name: value(collective.rank) if callable(value) else value for name, value in values.items()})
        before = held(thing, collective, own)
        change(thing, collective.rank)
        digests = collective.all_gather_object(before.digest_of_changes())
        if len(set(digests)) == 1:
            return ""
        warn: Any = before.compare()
        return "; ".join(warn.args[1])

    return run_threads(2, rank_main)


def counts(thing: Thing, rank: int) -> None:
    thing.n += 1 + rank


def rounds(thing: Thing, rank: int) -> None:
    thing.n += 1 + rank * 1e-12


def alike(thing: Thing, rank: int) -> None:
    thing.n, thing.names = thing.n + 1, {"b", "a"}


def makes(thing: Thing, rank: int) -> None:
    if rank == 0:
        thing.new = 1


@pytest.mark.parametrize(
    ("values", "change", "own", "told"),
    [
        ({"n": 0}, counts, (), "Thing.n is now 1 on rank 0, 2 on rank 1"),
        ({"n": 0}, counts, ("n",), ""),
        ({"n": 0}, counts, ("Thing.n",), ""),
        ({"n": lambda rank: rank}, counts, (), ""),
        ({"n": 1.0}, rounds, (), ""),
        ({"n": 0, "rank": lambda rank: rank}, alike, (), ""),
        ({"n": float("nan")}, alike, (), ""),
        ({}, makes, (), "Thing.new is now 1 on rank 0, None on rank 1"),
    ],
)
def test_attributes_that_differ_after_even_blocks(
    values: Mapping[str, Any], change: Change, own: tuple[str, ...], told: str
) -> None:
    assert compared(values, change, own) == [told] * 2


def test_a_required_value_that_differs_is_an_error() -> None:
    def rank_main(collective: ThreadCollective) -> None:
        value = {"norm": 0.0}
        before = Held(lambda: [Part("EMA", dict(value), None, is_required=True)], (), collective)
        value["norm"] += collective.rank
        before.digest_of_changes()
        before.compare()

    with pytest.raises(ProtocolError, match=r"the norm of EMA is 0\.0 on rank 0, 1\.0 on rank 1\..*J441"):
        run_threads(2, rank_main)


def copied(values: Mapping[str, Any], change: Change, own: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Return the attributes on each of three ranks after rank 1, the last with data, changed its own."""

    def rank_main(collective: ThreadCollective) -> dict[str, Any]:
        thing = Thing(**{name: value(collective.rank) if callable(value) else value for name, value in values.items()})
        before = held(thing, collective, own)
        change(thing, collective.rank)
        copy_state(collective, [("it", before.exchange(1))], 1)
        return dict(vars(thing))

    return run_threads(3, rank_main)


def trains(thing: Thing, rank: int) -> None:
    if rank == 1:
        thing.n, thing.momentum = 5, [torch.ones(2)]
    if rank == 0:
        thing.n = 2


def ends_where_it_began(thing: Thing, rank: int) -> None:
    if rank == 0:
        thing.n = 2


def test_attributes_after_an_uneven_block() -> None:
    for found in copied({"n": 0, "momentum": lambda _: [torch.zeros(2)]}, trains):
        assert found["n"] == 5
        assert found["momentum"][0].tolist() == [1.0] * 2
    assert [found["n"] for found in copied({"n": 0}, ends_where_it_began)] == [0] * 3
    assert [found["n"] for found in copied({"n": lambda rank: 10 * rank}, trains)] == [2, 5, 20]
    assert [found["n"] for found in copied({"n": 0}, trains, ("n",))] == [2, 5, 0]
    assert [len(found["momentum"]) for found in copied({"momentum": None, "n": 0}, trains)] == [1] * 3


def test_large_tensors_are_copied_whatever_their_digests() -> None:
    """A digest of a large tensor, or of one on a device, does not contain all of it."""

    def rank_main(collective: ThreadCollective) -> tuple[int, int]:
        thing = Thing(momentum=[torch.zeros(10_000, 2)], n=1)
        before = held(thing, collective)
        if collective.rank == 1:
            thing.momentum[0][0] = 1.0
        return before.digest_of_changes(), before.digest_of_changes(is_copied=True)

    (even, uneven), (other_even, other_uneven) = run_threads(2, rank_main)
    assert even == other_even == 0
    assert uneven != other_uneven

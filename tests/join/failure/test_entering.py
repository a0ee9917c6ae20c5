"""A rank that cannot build or enter its block, or never leaves it: the other ranks, which wait, get its error."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from join import Join, Joinable, PeerError
from join.collectives import collective_of
from tests.ending import Ending
from tests.harness import all_or_each, in_test_all
from tests.join.counter import Counter
from tests.meeting import store_file, tell, wait_for
from tests.shorter import using


def fail(ddp: DistributedDataParallel, how: str) -> None:
    if how == "object":
        Join([ddp, object()])
    elif how == "argument":
        Join([ddp], timeout=-1)
    elif how == "list":
        Join(ddp)  # pyright: ignore[reportArgumentType]
    else:  # the optimizer is in another block, as one that was never left
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with Join([optimizer], enable=False), Join([ddp, optimizer]):
            pass


def one_rank_fails(rank: int, how: str) -> str:
    ddp = DistributedDataParallel(torch.nn.Linear(3, 1))
    store: Any = dist.distributed_c10d._get_default_store()
    try:
        if rank == 0:
            fail(ddp, how)
        with Join([ddp]):
            pass
    except Exception as error:
        if rank == 0:  # it lives on until the others have ended
            store.wait(["ended 1", "ended 2"])
        else:
            store.set(f"ended {rank}", "")
        return f"{type(error).__name__}: {error}"
    return "fine"


FAILURES = {"object": "J096", "argument": "J002", "list": "J010", "open": "J059"}


@pytest.mark.parametrize("how", FAILURES)
def test_a_rank_that_fails_before_its_block(ending: Ending, how: str) -> None:
    own, *others = ending.run(one_rank_fails, how)
    assert FAILURES[how] in own
    assert all(found.startswith("PeerError: rank 0 failed") and FAILURES[how] in found for found in others)


class Broken(Counter):
    """A joinable that cannot be entered for the second time, or not at all."""

    where, entries = "", 1
    error: type[BaseException] = ValueError

    def _enter(self, where: str) -> None:
        if where == self.where:
            self.entries -= 1
            if self.entries == 0:
                raise self.error("mine")

    def before_entering(self, listed: Sequence[Joinable]) -> Mapping[str, Any]:
        self._enter("before_entering")
        return super().before_entering(listed)

    def attach(self, join: Join) -> None:
        super().attach(join)
        self._enter("attach")


def entering(rank: int, where: str, error: type[BaseException], block: str) -> str:
    """Rank 0 cannot enter a block, and goes on until the others have ended."""
    broken, outer = Broken(collective_of(None)), Counter(collective_of(None))
    broken.entries, broken.error = 2 if block == "second" else 1, error
    broken.where = where if rank == 0 else ""
    text = "fine"
    try:
        if block == "nested":
            with Join([outer]), Join([broken]):
                broken()
        for _ in range(2):
            with Join([broken]):
                broken()
    except BaseException as caught:
        text = f"{type(caught).__name__}: {caught}"
    tell()
    wait_for([1, 2] if rank == 0 else [])
    return text


@pytest.mark.parametrize(
    ("where", "error", "block", "over_group"),
    all_or_each(
        (*raised, block, over_group)
        for raised in [("before_entering", ValueError), ("attach", KeyboardInterrupt)]
        for block, over_group in product(["first", "second", "nested"], [False, True])
    ),
)
def test_a_rank_that_fails_while_it_enters(
    ending: Ending, where: str, error: type[BaseException], block: str, over_group: bool
) -> None:
    own, *others = ending.run(entering, where, error, block, over_group=over_group, limit=25)
    assert own == f"{error.__name__}: mine"
    for text in others:
        assert text.startswith(f"PeerError: rank 0 failed: {own}. The process group cannot be used")


def opening(rank: int, closes: bool) -> str:
    """Rank 1 ends in its block, or has left it."""
    counter = Counter(collective_of(None))
    join = opened[0] = Join([counter]).open()
    try:
        counter()
        if rank != 1 or closes:
            join.close()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


opened: dict[int, Join] = {}  # so that a block stays open to the end of the process


@pytest.mark.parametrize("over_group", [False, True])
@pytest.mark.parametrize("closes", [False, True])
def test_a_process_that_ends_in_its_block(ending: Ending, closes: bool, over_group: bool) -> None:
    zero, one, two = ending.ends(opening, closes, over_group=over_group, tidies=False, limit=25)
    assert one.result == "fine" and ("Call join.close()" in one.stderr) is not closes, one.text
    for end in (zero, two):
        told = "fine" if closes else "PeerError: rank 1 failed: JoinError: Its process ended inside a Join block."
        assert (end.result or "").startswith(told) and ("[J582]" in end.result) is not closes, end.result or end.text


def die(*_: Any, **__: Any) -> None:
    """Be killed, but not in the middle of a write to the store's file, which no other rank could read then."""
    with store_file().open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.kill(os.getpid(), signal.SIGKILL)


def killed_early(rank: int) -> str:
    """Rank 1 is killed while the group gets its backend for the CPU, before the ranks are connected."""
    group = dist.new_group(backend="cuda:gloo")
    if rank == 1:
        mock.patch.object(dist, "new_group", die).start()
    with using(silent=3.0, beat=0.5), pytest.raises(PeerError) as caught, Join([], process_group=group):
        pass
    return str(caught.value)


@in_test_all
def test_a_rank_that_is_killed_before_the_ranks_are_connected(ending: Ending) -> None:
    first, _, third = ending.ends(killed_early, limit=40, tidies=False)
    for end in (first, third):
        assert (end.result or "").startswith("rank 1 is gone"), (end.code, end.text)

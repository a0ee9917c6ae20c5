"""How many messages the ends of a block take between machines, and that none of them is waited for too early."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from join import Join, ProtocolError
from join.collectives import TorchCollective
from join.protocol.channel import Channel
from tests.harness import Pool
from tests.training import batch, build

OPERATIONS = "all_reduce", "broadcast", "all_gather"
LAYERS = 20


@contextmanager
def counted(found: list[str]) -> Iterator[None]:
    """Note the operations that are started on the groups, in their order."""

    def noted(kind: type, name: str) -> Callable[..., Any]:
        original = getattr(kind, name)

        def call(self: object, *args: Any) -> Any:
            found.append(name)
            return original(self, *args)

        return call

    with ExitStack() as patches:
        for name in OPERATIONS:
            patches.enter_context(mock.patch.object(TorchCollective, name, noted(TorchCollective, name)))
        yield


class Many(nn.Sequential):
    """As many parameters and buffers as a small ResNet: 62, and 60."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for _ in range(LAYERS):
            layers += [nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)]
        super().__init__(*layers, nn.Linear(4, 2))


def ends(rank: int) -> list[tuple[list[str], list[str]]]:
    """What is sent on entering, and on leaving from the header on that nobody announces: in each of several blocks."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Many())
    optimizer = torch.optim.Adam(ddp.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    join, results, found = Join([ddp, optimizer, scheduler]), list[tuple[list[str], list[str]]](), list[str]()
    drain = Channel.drain

    def drained(self: Channel) -> Any:
        outcome = drain(self)
        found[:] = ["header"]  # the one before was the last step's
        return outcome

    with counted(found), mock.patch.object(Channel, "drain", drained):
        for steps in (2, 2, 2 + rank, 2, 2 + rank):
            found.clear()
            with join:
                entry = list(found)
                for _ in range(steps):
                    optimizer.zero_grad()
                    ddp(torch.ones(3, 4) + rank).sum().backward()
                    optimizer.step()
                scheduler.step()
            results.append((entry, list(found)))
    return results


def test_messages(pool: Pool) -> None:
    for _, even, uneven, again, last in pool.run(ends, ranks=2, over_group=True):
        for block in (even, uneven, again, last):
            assert block[0] == ["all_reduce"]  # which is not waited for, as the next test shows
        for block in (even, again):
            assert block[1] == ["header", "all_gather", "broadcast"]  # the last two at the same time
        for block in (uneven, last):
            # two for a description of all state; can all ranks copy it?; all of it
            assert block[1] == ["header", "all_gather", *["broadcast"] * 2, "all_reduce", "broadcast"]


def enter_early(rank: int) -> list[float]:
    """Rank 1 enters only when rank 0 has entered."""
    store: Any = dist.distributed_c10d._get_default_store()
    ddp = DistributedDataParallel(build("norm"))
    seen: list[float] = []
    for block in range(3):
        if rank == 1 and block:
            store.wait([f"entered {block}"])
        with Join([ddp]) as join:
            if rank == 0:
                store.set(f"entered {block}", "")
            ddp(batch(rank, 0, block)[0]).sum().backward()
        seen.append(join.report.ranks[0].steps if rank else -1)  # one rank alone may read it
    return seen


@pytest.mark.parametrize("over_group", [False, True])
def test_a_rank_enters_before_the_others(pool: Pool, over_group: bool) -> None:
    assert pool.run(enter_early, ranks=2, over_group=over_group) == [[-1] * 3, [1] * 3]


def enter_others(rank: int, known: bool, then: str) -> tuple[str, list[str]]:
    """In the last block, ranks list other objects; which error they raise, and what they have sent before it."""
    ddp = DistributedDataParallel(build("norm"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for objects in ([ddp], [ddp, optimizer]) if known else ([ddp],):
        with Join(objects):
            ddp(batch(rank, 0, 0)[0]).sum().backward()
    found: list[str] = []
    try:
        with counted(found), Join([ddp, optimizer] if rank else [ddp]) as join:
            if then == "iterate":
                _ = list(join.iterate([1]))
            elif then == "backward":
                ddp(batch(rank, 0, 0)[0]).sum().backward()
    except ProtocolError as error:
        return str(error), found
    return "fine", found


@pytest.mark.parametrize("over_group", [False, True])
@pytest.mark.parametrize("then", ["backward", "iterate", "leave"])
@pytest.mark.parametrize("known", [False, True])
def test_ranks_that_list_other_objects(pool: Pool, known: bool, then: str, over_group: bool) -> None:
    told = r"The ranks entered Join with .* \(ranks \[0\]: nothing more; ranks \[1\]: SGD\)\. .* \[J020\]"
    for text, found in pool.run(enter_others, known, then, ranks=2, over_group=over_group):
        assert re.fullmatch(told, text)
        assert found == ["all_reduce"] * 2 * over_group + ["all_gather"] * 2  # no header, no burst


class Cached(nn.Linear):
    """Holds a mask that the loop may make longer, and numbers of other sizes."""

    mask: torch.Tensor
    counts: torch.Tensor
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("counts", torch.zeros(5, dtype=torch.int32))
        self.register_buffer("mean", torch.zeros(2, 3, dtype=torch.float64).t())


def lengthen(rank: int, lengths: list[tuple[int, int]]) -> list[Any]:
    """Between even blocks masks become longer; what each rank has after the last block, or the error."""
    module = Cached()
    ddp = DistributedDataParallel(module)
    for length in lengths:
        module.mask = torch.zeros(length[rank], dtype=torch.bool)
        try:
            with Join([ddp]):
                module.mask.fill_(rank == 0)  # after the forward, whose broadcast is another
                module.counts.fill_(rank + 1)
                module.mean.fill_(rank + 0.5)
        except ProtocolError as error:
            return [str(error)]
    return [module.mask.tolist(), set(module.counts.tolist()), set(module.mean.flatten().tolist())]


def test_buffers_of_other_sizes_than_last_time(pool: Pool) -> None:
    lengths = [(3, 3), (3, 3), (8, 8), (8, 8), (1, 1)]
    for count in range(1, len(lengths) + 1):
        found = pool.run(lengthen, lengths[:count], ranks=2)
        assert found == [[[True] * lengths[count - 1][0], {1}, {0.5}]] * 2


@pytest.mark.parametrize("last", [(3, 200), (200, 3)])
def test_buffers_that_differ_in_size(pool: Pool, last: tuple[int, int]) -> None:
    for (text,) in pool.run(lengthen, [(3, 3), (3, 3), last], ranks=2):
        assert "the shape of buffer mask of the buffer broadcast" in text
        assert f"[{last[0]}] on rank 0, [{last[1]}] on rank 1" in text

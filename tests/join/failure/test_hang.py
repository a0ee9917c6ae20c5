"""Each row of the table in ``docs/hang.md``: where ranks wait for each other, one of them says where all are."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from typing_extensions import override

from join import Join, JoinHook, JoinTimeoutError
from join.collectives import collective_of
from tests.ending import Ending, Running
from tests.explained import ends_once_explained, until_explained
from tests.join.counter import Counter, CounterHook
from tests.models import batch, build

COUNTS = (1, 3, 3, 3)


def train(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    loss = model(batch(rank, 0, step)[0]).square().mean()
    loss.backward()
    return loss.detach()


def log_loss(loss: torch.Tensor) -> None:
    dist.all_reduce(loss)


# -- loops that hang ---------------------------------------------------------------------------------------------------


def last_steps(rank: int, model: Any) -> None:
    with Join([], process_group=None):  # which lacks the model
        for step in range(COUNTS[rank] + 1):
            train(model, rank, step)


def metric(rank: int, model: Any, **options: Any) -> None:
    with Join([model], **options):
        for step in range(COUNTS[rank]):
            log_loss(train(model, rank, step))


def barrier(rank: int, model: Any) -> None:
    with Join([model]):
        for step in range(COUNTS[rank]):
            train(model, rank, step)
            dist.barrier()


def gather(rank: int, model: Any) -> None:
    with Join([model]):
        for step in range(COUNTS[rank]):
            dist.all_gather_object([None] * 4, train(model, rank, step).item())


def evaluation(rank: int, model: Any) -> None:
    with Join([model]):
        for step in range(2):
            train(model, rank, step)
        if rank == 3:
            log_loss(model.module(batch(0, 0, 0)[0]).sum().detach())


def branches(rank: int, model: Any) -> None:
    groups: list[Any] = [dist.new_group(), dist.new_group()]
    with Join([model]) as join:
        for x, _ in join.iterate([batch(rank, 0, step) for step in range(COUNTS[rank])]):
            if rank < 2:
                dist.all_reduce(x.sum(), group=groups[0])
            else:
                dist.broadcast(x.sum(), 0, group=groups[1])


def leaves(rank: int, model: Any) -> None:
    with Join([model]) as join:
        for step, _ in enumerate(join.iterate(range(3))):
            if rank == 1 and step == 1:
                break
            train(model, rank, step)
        dist.barrier()


def works(rank: int, model: Any) -> None:
    """Rank 2 calls one function in C for long, which may be a wait for another rank, too."""
    with Join([model]):
        for step in range(COUNTS[rank]):
            if rank == 2 and step == 1:
                time.sleep(60.0)
            train(model, rank, step)


class Slow(torch.utils.data.Dataset[Any]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return COUNTS[self.rank]

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 1 and self.rank == 2:
            until_explained()
        return batch(self.rank, 0, index)[0]


def loader(rank: int, model: Any) -> None:
    with Join([model]):
        for x in DataLoader(Slow(rank)):
            model(x).sum().backward()


def loader_of_iterate(rank: int, model: Any) -> None:
    with Join([model]) as join:
        for x in join.iterate(DataLoader(Slow(rank)), dummy="last"):
            join.scale(model(x).sum()).backward()


def entering(rank: int, model: Any) -> None:
    if rank == 1:
        until_explained()
    with Join([model]):
        pass


class Late(Counter):
    @override
    def join_hook(self, **kwargs: Any) -> JoinHook:
        return LateHook(self)


class LateHook(CounterHook):
    @override
    def post_hook(self, is_last_joiner: bool) -> None:
        if dist.get_rank() == 1:
            dist.barrier()


def leaving(rank: int, model: Any) -> None:
    with Join([Late(collective_of(None))]):
        pass
    until_explained()


AT_THE_END = r"waits for the others at the end of the block \(test_hang\.py:\d+, in \w+\)"
HANGS: dict[Callable[..., None], str] = {
    last_steps: rf"""
  rank 0: out of data, {AT_THE_END}
  ranks 1-3: in torch\.Tensor\.backward \(test_hang\.py:\d+, in train\)
Either it takes so long there, or rank 0 never calls the collectives of this backward\. In the second""",
    metric: rf"""
  rank 0: out of data since step 1, {AT_THE_END}
  ranks 1-3: in torch\.distributed\.all_reduce \(test_hang\.py:\d+, in log_loss\)
Rank 0 never calls this all_reduce\. Call it after the block, or loop over join\.iterate\. Docs: "My job""",
    barrier: rf"""
  rank 0: out of data since step 1, {AT_THE_END}
  ranks 1-3: in torch\.distributed\.barrier \(test_hang\.py:\d+, in barrier\)
Rank 0 never calls this barrier""",
    gather: rf"""
  rank 0: out of data since step 1, {AT_THE_END}
  ranks 1-3: in torch\.distributed\.all_gather_object \(test_hang\.py:\d+, in gather\)
Rank 0 never calls this all_gather_object""",
    evaluation: rf"""
  ranks 0-2: out of data since step 2, {AT_THE_END}
  rank 3: in torch\.distributed\.all_reduce \(test_hang\.py:\d+, in log_loss\)
Ranks 0-2 never call this all_reduce""",
    branches: r"""
  ranks 0-1: in step 1 of join\.iterate, in torch\.distributed\.all_reduce \(test_hang\.py:\d+, in branches\)
  ranks 2-3: in step 1 of join\.iterate, in torch\.distributed\.broadcast \(test_hang\.py:\d+, in branches\)
The ranks wait for each other\. Run the same collectives in the same order on all ranks\.""",
    leaves: r"""
  ranks 0, 2-3: in step 2 of join\.iterate, .* \(test_hang\.py:\d+, in train\)
  rank 1: left join\.iterate in step 2, in torch\.distributed\.barrier \(test_hang\.py:\d+, in leaves\)
""",
    works: rf"""
  rank 0: out of data since step 1, {AT_THE_END}
  ranks 1, 3: waits for the others \(test_hang\.py:\d+, in train\)
  rank 2: in the block \(test_hang\.py:\d+, in works\)
Either it takes so long there, or ranks 0-1, 3 never call a collective that was started there or earlier\. In the""",
    loader: rf"""
  rank 0: out of data since step 1, {AT_THE_END}
  ranks 1, 3: waits for the others \(test_hang\.py:\d+, in loader\)
  rank 2: reads its next batch \(explained\.py:\d+, in until_explained\)
The other ranks wait for rank 2\. Nothing is wrong""",
    loader_of_iterate: r"""
  ranks 0-1, 3: in step 1 of join\.iterate, in torch\.Tensor\.backward \(test_hang\.py:\d+, in loader_of_iterate\)
  rank 2: begins join\.iterate, reads its next batch \(explained\.py:\d+, in until_explained\)
The other ranks wait for rank 2\. Nothing is wrong""",
    entering: r"""
  ranks 0, 2-3: entered Join, waits for the others \(test_hang\.py:\d+, in entering\)
  rank 1: does not answer
No answer from rank 1: a rank that does not answer has not entered the block""",
    leaving: r"""
  ranks 0, 2-3: has left the block
  rank 1: out of data, waits for the others at the end of the block, in torch\.distributed\.barrier \(test.*post_hook\)
Ranks 0, 2-3 never call this barrier""",
}


def hang(rank: int, loop: Callable[..., None]) -> None:
    with ends_once_explained():
        loop(rank, DistributedDataParallel(build("mlp")))


Hang = tuple[Callable[..., None], bool]
CASES: list[Hang] = [(loop, False) for loop in HANGS] + [(metric, True), (entering, True), (branches, True)]


@pytest.fixture(scope="module")
def started(ending: Ending) -> Iterator[Callable[[Hang], Running]]:
    """Several at once: most of what they do is to wait."""
    running = dict[Hang, Running]()

    def start(case: Hang) -> Running:
        for each in CASES[CASES.index(case) :][:3]:
            if each not in running:
                running[each] = ending.start(hang, each[0], ranks=4, over_group=each[1], tidies=False, limit=50)
        return running.pop(case)

    yield start
    for each in running.values():
        each.ends()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].__name__}{' over the group' if case[1] else ''}")
def test_a_wait_explains_itself(started: Callable[[Hang], Running], case: Hang) -> None:
    ends = started(case).ends()
    text = "".join(end.stderr for end in ends)
    assert [end.code for end in ends] == [0] * 4, text
    assert text.count("join: no rank has moved") == 1, text
    assert re.search(r"join: no rank has moved for \d+ s\." + HANGS[case[0]], text), text


def times_out(rank: int) -> str:
    with pytest.raises(JoinTimeoutError) as caught:
        metric(rank, DistributedDataParallel(build("mlp")), timeout=1.5)
    return str(caught.value)


@pytest.mark.parametrize("over_group", [False, True])
def test_an_error_has_the_same_lines(ending: Ending, over_group: bool) -> None:
    for text in ending.run(times_out, ranks=4, over_group=over_group):
        assert re.search(HANGS[metric].split("Rank 0")[0].rstrip(), text), text

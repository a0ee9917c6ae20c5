"""A process that a rank forks inside a block: it is not a rank, and whatever becomes of it, the ranks train on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from join import Join
from tests.ending import Ending
from tests.harness import all_or_each
from tests.training import TOLERANCE, batch, build, mlp_in_one_process

COUNTS, FORKS = (4, 3, 0), 1  # batches by rank, and which rank forks


class Samples:
    """A data set of one rank."""

    def __len__(self) -> int:
        return COUNTS[FORKS]

    def __getitem__(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        return batch(FORKS, 0, at)


def loader_of(rank: int, how: str) -> Any:
    if rank == FORKS and how == "worker":
        return DataLoader(Samples(), batch_size=None, num_workers=1, multiprocessing_context="fork")  # pyright: ignore[reportArgumentType]
    return [batch(rank, 0, step) for step in range(COUNTS[rank])]


ENDS: dict[str, tuple[Callable[[], object], int]] = {
    "sys.exit": (lambda: sys.exit(0), 0),
    "os._exit": (lambda: os._exit(0), 0),
    "raise": (lambda: [].remove(0), 1),
    "return": (lambda: None, 0),
}


def training(rank: int, how: str, iterates: bool) -> list[torch.Tensor] | None:
    """Train; rank 1 forks in its second step, and goes on when the fork has ended."""
    ddp = DistributedDataParallel(build("mlp"))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    with Join([ddp, optimizer], divide_by_initial_world_size=False) as block:
        loader = loader_of(rank, how)
        for step, (x, y) in enumerate(block.iterate(loader) if iterates else loader):
            if (rank, step, how) == (FORKS, 1, "subprocess"):
                subprocess.run(["true"], check=True, preexec_fn=list)
            elif (rank, step) == (FORKS, 1) and how in ENDS:
                end, code = ENDS[how]
                if (pid := os.fork()) == 0:
                    end()
                    return None
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
            optimizer.zero_grad()
            loss = ((ddp(x) - y) ** 2).mean()
            (block.scale(loss) if iterates else loss).backward()
            optimizer.step()
    return [parameter.detach() for parameter in ddp.module.parameters()]


@pytest.mark.parametrize(
    ("how", "iterates", "over_group"),
    all_or_each((how, *way) for how in (*ENDS, "subprocess", "worker") for way in [(False, False), (True, True)]),
)
def test_the_ranks_train_on(ending: Ending, how: str, iterates: bool, over_group: bool) -> None:
    for end in ending.ends(training, how, iterates, over_group=over_group, tidies=False, limit=30):
        assert end.code == 0, end.text
        torch.testing.assert_close(end.result, mlp_in_one_process(COUNTS), atol=TOLERANCE, rtol=0)


def found_by(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def uses_of(block: Join, ddp: Any, x: torch.Tensor, batches: Iterator[Any]) -> list[Callable[[], object]]:
    """Uses of a block; the last one leaves it."""
    uses: list[Callable[[], object]] = [
        lambda: ddp(x).sum().backward(),
        lambda: Join([ddp]).open(),
        lambda: Join([], process_group=None).open(),
        lambda: block.scale(x),
    ]
    if isinstance(batches, Generator):
        uses += [lambda: block.is_last_step, lambda: list(batches)]
    return [*uses, block.close]


def asking(rank: int, iterates: bool) -> list[str]:
    """Let a fork of rank 1 use each part of its block, and then leave it."""
    ddp, (x, _) = DistributedDataParallel(build("mlp")), batch(0, 0, 0)
    found, (reads, writes) = list[str](), os.pipe()
    with Join([ddp]) as block:
        batches = iter(block.iterate([x] * 2) if iterates else [x] * 2)
        for step, x in enumerate(batches):
            if (rank, step) == (FORKS, 0) and (pid := os.fork()) == 0:
                os.write(writes, "\n".join(map(found_by, uses_of(block, ddp, x, batches))).encode())
                os._exit(0)
            elif (rank, step) == (FORKS, 0):
                os.close(writes)
                with os.fdopen(reads) as file:
                    found = file.read().splitlines()
                os.waitpid(pid, 0)  # pyright: ignore[reportPossiblyUnboundVariable]
            block.scale(ddp(x).sum()).backward()
    return found


@pytest.mark.parametrize(("iterates", "over_group"), all_or_each(product([False, True], [False, True])))
def test_a_fork_is_not_a_rank(ending: Ending, iterates: bool, over_group: bool) -> None:
    *used, left = ending.run(asking, iterates, over_group=over_group, limit=30)[FORKS]
    assert left == "fine" and len(used) == (6 if iterates else 4)
    for text in used:
        assert "J581" in text or "J059" in text, used


def between(rank: int) -> str:
    """Fork between two blocks, and let the fork enter the next one."""
    ddp, (x, _), text, (reads, writes) = DistributedDataParallel(build("mlp")), batch(0, 0, 0), "", os.pipe()
    with Join([ddp]) as block:
        ddp(x).sum().backward()
    if rank == FORKS:
        if (pid := os.fork()) == 0:
            os.write(writes, found_by(block.open).encode())
            os._exit(0)
        os.close(writes)
        with os.fdopen(reads) as file:
            text = file.read()
        os.waitpid(pid, 0)
    with block:
        ddp(x).sum().backward()
    return text


@pytest.mark.parametrize("over_group", [False, True])
def test_a_fork_enters_no_block(ending: Ending, over_group: bool) -> None:
    assert "J581" in ending.run(between, over_group=over_group, limit=30)[FORKS]

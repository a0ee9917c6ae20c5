"""What blocks need beside the process group is made once a group: nothing stays of a block, none waits for a store."""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from join import Join
from join.collectives import torch as of_torch
from join.collectives._torch_private import store_of
from tests.harness import ALL, Pool, in_test_all
from tests.training import batch, build


class Counted:
    """A store that counts its connections, which are made when a test allows it."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.clones, self.may_connect = 0, threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def clone(self) -> Any:
        self.clones += 1
        self.may_connect.wait()
        return self._store.clone()


def kept_by(blocks: int, module: Any, rank: int) -> list[int]:
    """The numbers of connections, threads and exit hooks of this process after some blocks."""
    for block in range(blocks):
        with Join([module]):
            for step in range((block + rank) % 2):
                module(batch(rank, 0, step)[0]).sum().backward()
    files = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    connections = sum("socket:" in file or "/dev/shm" in file for file in files)
    return [connections, threading.active_count(), atexit._ncallbacks()]


def in_blocks(rank: int, blocks: int, slowly: bool) -> None:
    """Run blocks; the store answers only after the first ones, if it is slow."""
    store = Counted(store_of(dist.distributed_c10d._get_default_group()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_torch, "store_of", lambda group: store)
        module = DistributedDataParallel(build("mlp"))
        if not slowly:
            store.may_connect.set()
        kept = kept_by(2, module, rank)
        store.may_connect.set()
        now = kept_by(blocks - 2, module, rank)
        assert all(after <= before for after, before in zip(now, kept, strict=True)), (kept, now)
        assert store.clones <= 1


@pytest.mark.parametrize("over_group", [False, True])
def test_nothing_stays_of_blocks(pool: Pool, over_group: bool) -> None:
    pool.run(in_blocks, (200 if ALL else 50) if over_group else 20, False, ranks=2, over_group=over_group)


@in_test_all
def test_no_block_waits_for_a_slow_store(pool: Pool) -> None:
    pool.run(in_blocks, 4, True, ranks=2, over_group=True)

"""A rank leaves a loop whose body has a collective of its own: the others are told, and all processes end."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import join.early_exit
from join import Join
from tests.models import batch, build


def rank_main(rank: int, path: str, how: str, results: Any) -> None:
    join.early_exit.LIMIT_SECONDS = 3.0
    dist.init_process_group("gloo", store=dist.FileStore(path, 3), rank=rank, world_size=3)
    ddp = DistributedDataParallel(build("mlp"))
    optimizer = torch.optim.Adam(ddp.parameters())
    try:
        with Join([ddp, optimizer]) as block:
            for step, (x, y) in enumerate(block.iterate([batch(rank, 0, step) for step in range(3 + rank)])):
                optimizer.zero_grad()
                ((ddp(x) - y) ** 2).mean().backward()
                if rank == 1 and step == 2 and how == "break":
                    break
                if rank == 1 and step == 3:  # where rank 0 has a dummy
                    raise ValueError("mine")
                dist.all_reduce(torch.ones(3))  # the body's own, which nobody can shadow
                optimizer.step()
    except Exception as error:
        results.put((rank, f"{type(error).__name__}: {error}"))
        # Rank 1's process ends here: this sets the others free.


@pytest.mark.parametrize("how", ["raise", "break"])
def test_all_processes_end_and_say_why(tmp_path: Path, how: str) -> None:
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    arguments = (str(tmp_path / "store"), how, results)
    processes = [context.Process(target=rank_main, args=(rank, *arguments), daemon=True) for rank in range(3)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 90
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    assert not hung
    texts = dict(results.get(timeout=5) for _ in range(3))
    mine = "ValueError: mine" if how == "raise" else "ProtocolError: rank 1 left the loop over join.iterate early"
    assert texts[1].startswith(mine)
    for rank in (0, 2):
        assert texts[rank].startswith("PeerError: ")
        assert f"rank 1 failed: {mine}" in texts[rank]

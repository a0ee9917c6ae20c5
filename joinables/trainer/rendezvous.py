"""Store in which the ranks of a launch meet: :func:`fresh_store`.

A store may have keys of ranks that are gone. The store of torchrun outlives a restart of all ranks, possibly with a
different number of ranks, and the earlier ranks need not all have reached the same point. So ranks that need a part of
the store for themselves do not rely on counters. Rank 0 chooses a name that was never used, and makes sure that the
ranks that receive it are running now::

    rank 0                                          any other rank
    "job"                                           waits for "job"; raises if it is in another one
                                                    "hello": a word of its own, never used before
    for each "hello": the name, under that word
    (again, if an earlier rank left the word)       waits for the name under its word
    waits for all "met"                             "met", under the name
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import cast

import torch.distributed as dist

from join.collectives.board import printable

RUN_ID, USE_AGENT_STORE = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"  # variables of torchrun
_LONGEST_PAUSE = 0.05  # seconds, before rank 0 looks again


def job_of(environ: Mapping[str, str], world_size: int) -> str:
    """Return a text that is equal for all ranks of a job, and in practice different for ranks of another job."""
    known = [f"{RUN_ID}={environ[RUN_ID]}"] if RUN_ID in environ else []
    if environ.get(USE_AGENT_STORE) != str(True):  # an agent may start a different number of ranks later
        known.append(f"{world_size} ranks")
    return ", ".join([*known, f"user {os.getuid()}"])


def fresh_store(store: dist.Store, rank: int, world_size: int, environ: Mapping[str, str] = os.environ) -> dist.Store:
    """Return a view of ``store`` without keys. All ranks that meet there call this, equally often.

    Raises:
        RuntimeError: If another job has opened the store.
        torch.distributed.DistStoreError: If some ranks do not arrive within the time limit of ``store``.
    """
    own = job_of(environ, world_size)
    if rank == 0:
        store.set("job", own)
        return _lead(store, world_size)
    if (job := printable(store.get("job").decode(errors="replace"))) != own:
        raise RuntimeError(
            f"Rank {rank} of a job ({own}) has reached the store of another job ({job}). Start each job with a"
            " MASTER_ADDR and MASTER_PORT of its own. [J572]"
        )
    word = uuid.uuid4().hex
    store.set(f"hello/{rank}", word)
    name = store.get(f"name/{word}").decode()
    fresh = dist.PrefixStore(name, store)
    fresh.set(f"met/{rank}", "")
    return fresh


def _lead(store: dist.Store, world_size: int) -> dist.Store:
    name = f"launch/{uuid.uuid4().hex}"
    fresh = dist.PrefixStore(name, store)
    missing = list(range(1, world_size))
    limit = cast("timedelta", store.timeout)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    deadline, pause = time.monotonic() + limit.total_seconds(), 0.001
    words: dict[int, str] = {}  # the words under which the ranks were sent the name
    while missing := [rank for rank in missing if not fresh.check([f"met/{rank}"])]:
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"ranks {missing} of {world_size} have not arrived at the launch")
        for rank in missing:
            if store.check([f"hello/{rank}"]):
                word = store.get(f"hello/{rank}").decode(errors="replace")
                if words.get(rank) != word:
                    store.set(f"name/{word}", name)
                    words[rank] = word
        time.sleep(pause)  # a wait for their keys would print a warning of torch when it expires
        pause = min(2 * pause, _LONGEST_PAUSE)
    return fresh

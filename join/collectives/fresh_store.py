"""A part of a store that only the ranks of this launch use: :func:`fresh_store`.

A store may hold keys of ranks that are gone: torchrun's lives on when all ranks are started anew, as others and as
another number of them, and not all of those before need have come equally far. So ranks do not count; rank 0 chooses a
name that was never used, and makes sure that it tells ranks that are there now::

    rank 0                                          any other rank
                                                    "hello": a word of its own, never used before
    for each "hello": the name, under that word
    (once more, if that was left by one before)     awaits the name under its word
    awaits all "met"                                "met", under the name
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import cast

import torch.distributed as dist

_LONGEST_PAUSE = 0.05  # seconds, before rank 0 looks again


def fresh_store(store: dist.Store, rank: int, world_size: int) -> dist.Store:
    """Return a view of ``store`` in which no keys are; all ranks that meet there call it, equally often.

    Raises:
        torch.distributed.DistStoreError: if they do not all come within the time limit of ``store``.
    """
    if rank == 0:
        return _lead(store, world_size)
    word = uuid.uuid4().hex
    store.set(f"hello/{rank}", word)
    name = store.get(f"name/{word}").decode()
    ours = dist.PrefixStore(name, store)
    ours.set(f"met/{rank}", "")
    return ours


def _lead(store: dist.Store, world_size: int) -> dist.Store:
    name = f"launch/{uuid.uuid4().hex}"
    ours = dist.PrefixStore(name, store)
    told, pause = dict[int, str](), 0.001
    missing = list(range(1, world_size))
    limit = cast("timedelta", store.timeout)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    deadline = time.monotonic() + limit.total_seconds()
    while missing:
        for rank in missing:
            if store.check([f"hello/{rank}"]):
                word = store.get(f"hello/{rank}").decode()
                if told.get(rank) != word:
                    store.set(f"name/{word}", name)
                    told[rank] = word
        missing = [rank for rank in missing if not ours.check([f"met/{rank}"])]
        if missing and time.monotonic() > deadline:
            raise dist.DistStoreError(f"ranks {missing} of {world_size} have not come to the launch")
        if missing:  # not in a wait for their keys, of which torch prints that it was in vain
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
    return ours

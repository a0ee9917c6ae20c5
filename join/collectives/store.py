"""Stores that processes of one machine make for themselves: :func:`local_store` and :func:`shared_store`."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from join.collectives.timeouts import TIMEOUTS

_LOOPBACK = "127.0.0.1"


def local_store() -> dist.TCPStore:
    """Return a new store for processes of this machine, on a free port of 127.0.0.1."""
    listening = socket.create_server((_LOOPBACK, 0))  # without it, the store would listen on all interfaces
    port, file = listening.getsockname()[1], listening.detach()
    return dist.TCPStore(_LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=file)


def shared_store(rank: int, gather: Callable[[Any], list[Any]]) -> dist.Store | None:
    """Return a store that rank 0 makes for all ranks; ``None`` on all ranks if they are on several machines.

    It is also ``None`` if one of them cannot reach the store.

    Args:
        rank: This rank.
        gather: Gathers an object of each rank.
    """
    if len(set(gather(socket.gethostname()))) > 1:
        return None
    store: dist.TCPStore | None = None
    with suppress(OSError, RuntimeError):
        store = local_store() if rank == 0 else None
    port = gather(store and store.port)[0]
    with suppress(OSError, RuntimeError):
        if rank > 0 and port is not None:
            store = dist.TCPStore(_LOOPBACK, port, is_master=False, timeout=timedelta(seconds=TIMEOUTS.silent))
    return store if all(gather(store is not None)) else None

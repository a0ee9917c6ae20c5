"""Stores that ranks make for themselves: :func:`local_store` and :func:`agreed_store`."""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from join.collectives.timeouts import TIMEOUTS

_LOOPBACK = "127.0.0.1"


def local_store(listening: socket.socket | None = None) -> dist.TCPStore:
    """Return a new store for processes of this machine, on a free port of 127.0.0.1.

    Args:
        listening: A socket that listens on such a port, which the store takes over; by default a new one.
    """
    # Without this socket, the store would listen on all interfaces.
    listening = listening or socket.create_server((_LOOPBACK, 0))
    port, file = listening.getsockname()[1], listening.detach()
    return dist.TCPStore(_LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=file)


def agreed_store(rank: int, gather: Callable[[Any], list[Any]]) -> dist.Store:
    """Return a store that rank 0 makes for all ranks: on 127.0.0.1 if they have one host name, or on all interfaces.

    Args:
        rank: This rank.
        gather: Gathers an object of each rank.

    Raises:
        RuntimeError: On all ranks, if one of them cannot connect.
    """
    hosts = gather(socket.gethostname())
    host = _LOOPBACK if len(set(hosts)) == 1 else hosts[0]

    def served() -> dist.TCPStore:
        return local_store() if host == _LOOPBACK else dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)

    store, failure = _tried(served) if rank == 0 else (None, "")
    port = gather(0 if store is None else store.port)[0]
    if rank > 0 and port:
        limit = timedelta(seconds=TIMEOUTS.silent)
        store, failure = _tried(lambda: dist.TCPStore(host, port, is_master=False, timeout=limit))
    failures = [f"rank {other}: {text}" for other, text in enumerate(gather(failure)) if text]
    if store is None or failures:
        raise RuntimeError(
            f"Ranks cannot reach the store at {host}:{port} in which rank 0 keeps their notes ({'; '.join(failures)})."
            " Let the host name of rank 0 resolve to an address that all machines reach, or override connect() and"
            " board() of the collective. [J819]"
        )
    return store


def _tried(make: Callable[[], dist.TCPStore]) -> tuple[dist.TCPStore | None, str]:
    try:
        return make(), ""
    except (OSError, RuntimeError) as error:
        return None, str(error) or type(error).__name__

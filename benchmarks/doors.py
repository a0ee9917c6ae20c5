"""Benchmark of the connections that ranks make for messages, and of notes in the store, by number of simulated ranks.

Ranks are threads of four processes. The exchange of addresses before the connections is simulated, too: in a real
group, it is two all-gathers of the group. Ranks have no store while they connect, so they request nothing from it. All
ranks share the processors of this machine, so the processor time of a rank says more than the wall time of all.

    connections  connections that a rank makes or accepts for good
    attempts     connections that a rank makes, with those to further addresses of a rank
    seconds      wall time until all ranks are connected
    CPU          processor time of a rank
    note         requests to the store for leaving a note, with the bell
    look         requests to the store for reading the notes and the progress of all ranks
    opening      requests to the store when a process group's first block opens its own connection
"""

from __future__ import annotations

import argparse
import threading
import time
from collections import Counter
from typing import Any
from unittest import mock

import torch.distributed as dist
from common import run_processes, save, table

from join.collectives import handshake
from join.collectives.board import Note, Progress, StoreBoard
from join.collectives.messages import rounds_of
from join.collectives.plain import as_json, from_json

PROCESSES = 4
RANKS = [8, 64, 1000]
ADDRESSES = ["127.0.0.2", "127.0.0.1"]


class Exchange:
    """All-gather of all ranks: first of the threads of each process, then of the processes."""

    def __init__(self, world_size: int) -> None:
        each = world_size // PROCESSES
        self.ranks = range(each * dist.get_rank(), each * (dist.get_rank() + 1))
        self.rows: dict[int, bytes] = {}
        self.all_rows: list[bytes] = []
        self.has_all = threading.Barrier(each, self._gather)

    def _gather(self) -> None:
        gathered: list[Any] = [None] * PROCESSES
        dist.all_gather_object(gathered, [self.rows[rank] for rank in self.ranks])
        self.all_rows = [row for part in gathered for row in part]


class Rank:
    """Part of a collective: the rank, and the exchange of addresses. It has no store."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self.rank, self._exchange = rank, exchange

    def all_gather_object(self, value: Any, *, plain: bool) -> list[Any]:
        assert plain
        self._exchange.rows[self.rank] = as_json(value)
        self._exchange.has_all.wait()
        return [from_json(row) for row in self._exchange.all_rows]


def connect(world_size: int) -> dict[str, float]:
    """Connect the ranks of this process with all others."""
    exchange, distances = Exchange(world_size), {distance for distance, _ in rounds_of(world_size)}
    met: dict[int, Any] = {}
    attempts: Counter[int] = Counter()
    cpu: Counter[int] = Counter()
    meeting: Any = handshake._Meeting  # pyright: ignore[reportPrivateUsage]
    call = meeting._call

    def counted(self: Any, *args: Any) -> None:
        attempts[self._rank] += 1
        call(self, *args)

    def one(rank: int) -> None:
        collective: Any = Rank(exchange, rank)
        began = time.thread_time()
        met[rank] = handshake.meet(collective, distances, ADDRESSES, 600.0)
        cpu[rank] += time.thread_time() - began  # pyright: ignore[reportArgumentType]

    threads = [threading.Thread(target=one, args=(rank,)) for rank in exchange.ranks]
    dist.barrier()
    with mock.patch.object(meeting, "_call", counted):
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - began
    connections = [each for inward, outward in met.values() for each in (*inward.values(), *outward.values())]
    dist.barrier()
    for connection in connections:
        connection.close()
    size = len(exchange.ranks)
    return {
        "connections": len(connections) / size,
        "attempts": sum(attempts.values()) / size,
        "seconds": seconds,
        "cpu": sum(cpu.values()) / size,
    }


def leave_notes(world_size: int) -> dict[str, float]:
    """Count the requests of the last rank, after all others have left a note."""
    store = dist.HashStore()
    counting = mock.Mock(wraps=store)
    counting.clone.return_value = counting
    for rank in range(world_size):
        board = StoreBoard(rank, world_size, counting if rank == world_size - 1 else store)
        board.block = 1
        board.tell(Progress(step=rank))
        opening = len(counting.method_calls) - 2  # without what clones and tells
        counting.reset_mock()
        board.post(Note(rank, 0, "ValueError", "text"))
    note = len(counting.method_calls)
    counting.reset_mock()
    assert len(board.notes()) == len(board.progress()) == world_size
    return {"note": note, "look": len(counting.method_calls), "opening": opening}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    options = parser.parse_args()
    entries = [{"ranks": ranks, **run_processes(PROCESSES, connect, ranks)[0], **leave_notes(ranks)} for ranks in RANKS]
    head = ["ranks", "connections", "attempts", "seconds", "CPU", "note", "look", "opening"]
    rows = [
        [
            *(f"{entry[name]:.0f}" for name in ("ranks", "connections", "attempts")),
            f"{entry['seconds']:.2f} s",
            f"{entry['cpu'] * 1e3:.1f} ms",
            *(f"{entry[name]:.0f}" for name in ("note", "look", "opening")),
        ]
        for entry in entries
    ]
    print(table(head, rows))
    save(options.json, results=entries)


if __name__ == "__main__":
    main()

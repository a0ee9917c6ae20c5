"""Benchmark of notes in the store, by number of simulated ranks.

note         requests to the store for leaving a note, with the bell
look         requests to the store for reading the notes and the progress of all ranks
opening      requests to the store when a process group's first block opens its own connection
"""

from __future__ import annotations

import argparse
from unittest import mock

import torch.distributed as dist
from common import save, table

from join.collectives.board import Note, Progress, StoreBoard

RANKS = [8, 64, 1000]


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
    entries = [{"ranks": ranks, **leave_notes(ranks)} for ranks in RANKS]
    head = ["ranks", "note", "look", "opening"]
    rows = [[f"{entry[name]:.0f}" for name in head] for entry in entries]
    print(table(head, rows))
    save(options.json, results=entries)


if __name__ == "__main__":
    main()

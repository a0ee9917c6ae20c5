"""Traces for tests: of ranks that are threads, and written by hand."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from join import Join
from join.collectives import ThreadCollective, run_threads
from join.recording import COLUMNS, FORMAT, VERSION, part_of
from joinables.trainer._shared_call import SharedCall
from tests.join.counter import Counter

COUNTS = (3, 5, 0)


def record(path: Path, counts: tuple[int, ...] = COUNTS, *, late: int = 1, loop: bool = False) -> None:
    """Record ranks with so many steps, of which one is late at each."""

    def rank_main(collective: ThreadCollective) -> None:
        follower = Counter(collective)

        def together() -> None:
            follower.reduce(1)

        together.__qualname__ = "<leading> & co"
        leading = SharedCall(together, collective)
        with Join([leading, follower]) as join:
            join.trace(path)
            mine = range(counts[collective.rank])
            for _ in join.iterate(mine) if loop else mine:
                time.sleep(0.02 if collective.rank == late else 0)
                leading()
                follower()

    run_threads(len(counts), rank_main)


def write(path: Path, rank: int, events: list[list[Any]], *, world_size: int = 2, **changes: Any) -> None:
    """Write the file of one rank."""
    told = {
        "format": FORMAT,
        "version": VERSION,
        "rank": rank,
        "world_size": world_size,
        "host": f"host{rank}",
        "process": 100 + rank,
        "entered": 1000.0,
        "traced_from": 0.0,
        "ended": 9.0,
        "error": None,
        "joinables": ["one", "other"],
        "announced": [2, 0],
        "shadowed": [0, 1],
        "left_out": 0,
        "columns": COLUMNS,
        "events": events,
    }
    part_of(path, rank).write_text(json.dumps(told | changes))

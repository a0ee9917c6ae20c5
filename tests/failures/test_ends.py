"""Whatever goes wrong on one rank, wherever: it shows its own exception, and all others end with that as the cause."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

import pytest

from tests.ending import End, Ending
from tests.failures.cells import AT, FAILS, HOWS, MODES, OWN, Cell, exists, fit, goes_on, main

SOAK = int(os.environ.get("SOAK", "0"))
SECONDS = 10.0  # that the others may take

CELLS = [cell for cell in (Cell(*each) for each in product(MODES, HOWS, (True, False), (None, 5.0))) if exists(cell)]


def pairwise(cells: list[Cell]) -> list[Cell]:
    """Some of the cells, in which each pair of what makes a cell occurs that occurs at all."""

    def pairs(cell: Cell) -> set[tuple[int, int, object, object]]:
        return {(i, j, cell[i], cell[j]) for i in range(4) for j in range(i + 1, 4)}

    missing = set.union(*map(pairs, cells))
    chosen: list[Cell] = []
    while missing:
        best = max(cells, key=lambda cell: len(pairs(cell) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def files_in_memory() -> set[str]:
    return {each.name for each in Path("/dev/shm").iterdir() if "join" in each.name}


@pytest.mark.parametrize("cell", CELLS if SOAK else pairwise(CELLS), ids=str)
def test_end(ending: Ending, cell: Cell) -> None:
    before = files_in_memory()
    over_group = not cell.memory
    if cell.mode == "fit":
        check_fit(cell, *ending.ends(fit, cell, ranks=1, over_group=over_group, group=False))
    else:
        check(cell, ending.ends(main, cell, over_group=over_group))
    assert files_in_memory() == before


def check(cell: Cell, ends: list[End]) -> None:
    failed, *others = ends[FAILS], *(end for rank, end in enumerate(ends) if rank != FAILS)
    told = "\n".join(f"--- rank {rank}: {end.code}\n{end.text}" for rank, end in enumerate(ends))
    codes = {"sys.exit": 3, "os._exit": 7, "SIGKILL": -9, "KeyboardInterrupt": -2}
    if cell == Cell("steps", "break", cell.memory, cell.timeout):
        assert f"declared steps=4 and made {AT}" in failed.error, told
    assert failed.code == codes.get(cell.how, 1), told
    if cell.how not in codes or cell.how == "KeyboardInterrupt":
        assert failed.error.startswith(OWN[cell.how]), told
    failed_at = float(failed.said("failed") or failed.at)
    for end in others:
        assert end.code == 1, told
        assert end.error.startswith("PeerError: "), told
        cause = OWN.get(cell.how, "is gone")
        assert f"rank {FAILS} failed: {cause}" in end.error or f"rank {FAILS} {cause}" in end.error, told
        assert end.at - max(failed.at, failed_at) < SECONDS, told
        assert end.said("usable") == str(goes_on(cell)), told
        assert end.said("met") == ("True" if goes_on(cell) else ""), told
        assert "restart from a checkpoint" in end.error or goes_on(cell), told
    assert failed.at - failed_at < SECONDS, told


def check_fit(cell: Cell, end: End) -> None:
    dies = {
        "sys.exit": "exited with code 3",
        "os._exit": "exited with code 7",
        "SIGKILL": "was killed by SIGKILL",
    }
    if cell.how in dies:
        assert f"WorkerDied: rank {FAILS} {dies[cell.how]}" in end.error, end.text
    else:
        assert end.error.startswith(OWN[cell.how]), end.text
    assert end.code == (-2 if cell.how == "KeyboardInterrupt" else 1), end.text
    assert end.at - float(end.said("failed")) < SECONDS, end.text

"""Whatever goes wrong on one rank, wherever: it shows its own exception, and all others end with that as the cause."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from tests.ending import End, Ending, Running
from tests.harness import all_or_each, assert_soon, cases_that_run, in_quiet
from tests.join.failure.cells import FAILS, HOWS, MODES, OWN, Cell, exists, fit, main

SECONDS = 10.0  # that the others may take
AT_ONCE = 3
MEMORY = Path("/dev/shm")

CELLS = [cell for cell in (Cell(*each) for each in product(MODES, HOWS, (True, False), (None, 5.0))) if exists(cell)]


@pytest.fixture(scope="module", autouse=True)
def files_before() -> set[Path]:
    """What is in shared memory before any rank fails."""
    return set(MEMORY.iterdir())


@pytest.fixture(scope="module")
def started() -> Iterator[dict[Cell, Running]]:
    """The cells that were started and not waited for yet."""
    found: dict[Cell, Running] = {}
    yield found
    for running in found.values():  # of tests that did not come to run
        running.ends()


def start(ending: Ending, cell: Cell) -> Running:
    over_group = not cell.memory
    if cell.mode == "fit":
        return ending.start(fit, cell, ranks=1, over_group=over_group, group=False)
    return ending.start(main, cell, over_group=over_group)


@in_quiet
@pytest.mark.parametrize("cell", all_or_each(CELLS, Cell._asdict, together=2), ids=str)
def test_end(request: pytest.FixtureRequest, ending: Ending, started: dict[Cell, Running], cell: Cell) -> None:
    """The cells of the next tests are started with this one: most of what they do is to wait."""
    coming = cases_that_run(request, "cell")
    for each in coming[(at := coming.index(cell)) : at + AT_ONCE]:
        if each not in started:
            started[each] = start(ending, each)
    ends = started.pop(cell).ends()
    check_fit(cell, *ends) if cell.mode == "fit" else check(cell, ends)


def test_no_file_is_left_in_memory(files_before: set[Path]) -> None:
    """Whatever became of the ranks of the tests above."""

    def left() -> set[Path]:
        files = set(MEMORY.iterdir()) - files_before
        return {file for file in files if "join" in file.name or "PYTEST_XDIST_WORKER" not in os.environ}

    deadline = time.monotonic() + 10  # other tests may use some for a moment
    while left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left()


def check(cell: Cell, ends: list[End]) -> None:
    failed, *others = ends[FAILS], *(end for rank, end in enumerate(ends) if rank != FAILS)
    told = "\n".join(f"--- rank {rank}: {end.code}\n{end.text}" for rank, end in enumerate(ends))
    codes = {"sys.exit": 3, "os._exit": 7, "SIGKILL": -9, "KeyboardInterrupt": -2}
    assert failed.code == codes.get(cell.how, 1), told
    if cell.how not in codes or cell.how == "KeyboardInterrupt":
        assert failed.error.startswith(OWN[cell.how]), told
    failed_at = float(failed.said("failed") or failed.at)
    for end in others:
        assert end.code == 1, told
        assert end.error.startswith("PeerError: "), told
        cause = OWN.get(cell.how, "is gone")
        assert f"rank {FAILS} failed: {cause}" in end.error or f"rank {FAILS} {cause}" in end.error, told
        assert_soon(end.at - max(failed.at, failed_at), SECONDS, told)
        assert "restart from a checkpoint" in end.error, told
    assert_soon(failed.at - failed_at, SECONDS, told)


def check_fit(cell: Cell, end: End) -> None:
    dies = {
        "sys.exit": "exited with code 3",
        "os._exit": "exited with code 7",
        "SIGKILL": "was killed by SIGKILL",
    }
    if cell.how in dies:
        assert f"WorkerDied: Rank {FAILS} {dies[cell.how]}" in end.error, end.text
    else:
        assert end.error.startswith(OWN[cell.how]), end.text
    assert end.code == (-2 if cell.how == "KeyboardInterrupt" else 1), end.text
    assert_soon(end.at - float(end.said("failed")), SECONDS, end.text)

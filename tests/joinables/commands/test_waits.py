"""Who waited for whom, in headers and in bursts."""

from __future__ import annotations

from pathlib import Path

import pytest

from joinables.commands.parts import read
from joinables.commands.waits import waits_of
from tests.joinables.commands.made import record, write


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("late", [0, 1])
def test_the_late_rank_is_waited_for(tmp_path: Path, late: int, loop: bool) -> None:
    record(tmp_path / "run.json", (4, 4, 0), late=late, loop=loop)
    waits = waits_of(read(tmp_path / "run.json"))
    seconds = waits.seconds
    assert max(seconds, key=lambda pair: seconds[pair])[1] == late
    total = sum(each for (_, on), each in seconds.items() if on == late)
    assert total > 0.5 * sum(seconds.values())  # on a busy machine, others are late, too
    if not loop:
        assert seconds[2, late] > 0.04  # it has no data, and waits for each header
    for latencies in waits.latencies.values():
        assert all(each >= 0 for each in latencies)


def test_a_header(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write(path, 0, [["sent", 1.0, 1.0, 0, 1], ["waited", 1.1, 3.5, "", 1], ["waited", 4.0, 5.0, "sums", None]])
    write(path, 1, [["sent", 3.0, 3.0, None, 1], ["waited", 3.1, 3.2, "", 1]])
    waits = waits_of(read(path))
    (wait,) = waits.all
    assert (wait.rank, wait.event.kind, wait.on, wait.came) == (0, "waited", 1, 3.0)
    assert wait.shares == {1: pytest.approx(1.9)}
    assert waits.latencies == {0: [pytest.approx(0.5)]}  # rank 1 came last, and waited for no rank


def test_a_burst(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write(path, 0, [["ran", 1.0, 3.0, 0, 1], ["ran", 4.0, 4.0, 0, 2], ["ran", 5.0, 6.0, 1, None]])
    write(path, 1, [["shadowed", 2.5, 3.0, 0, 1], ["shadowed", 5.0, 5.5, 0, 2]])
    (wait,) = waits_of(read(path)).all
    assert (wait.rank, wait.event.number, wait.came, wait.shares) == (0, 1, 2.5, {1: 1.5})
    # The second ends before the other comes.
    assert waits_of(read(path)).seconds == {(0, 1): 1.5}


def test_of_a_rank_that_has_written_nothing_nothing_is_known(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write(path, 0, [["sent", 1.0, 1.0, 0, 1], ["waited", 1.1, 3.5, "", 1], ["ran", 4.0, 5.0, 0, 1]])
    assert waits_of(read(path)).all == []


def test_a_rank_that_was_held_up_itself(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write(path, 0, [["sent", 0.5, 0.5, 0, 1], ["ran", 1.0, 7.0, 0, 1]], world_size=3)
    write(path, 1, [["sent", 4.0, 4.0, 0, 1], ["ran", 4.1, 7.0, 0, 1]], world_size=3)  # late
    write(
        path, 2, [["sent", 2.0, 2.0, None, 1], ["waited", 2.1, 4.2, "", 1], ["shadowed", 5.0, 7.0, 0, 1]], world_size=3
    )
    waits = waits_of(read(path))
    assert waits.latencies == {2: [pytest.approx(0.2)]}
    shares = {(wait.rank, wait.event.kind): wait.shares for wait in waits.all}
    assert shares == {
        (0, "ran"): {2: pytest.approx(1.0 + 1.1), 1: pytest.approx(4.0 - 2.1)},  # of which rank 2 waited for rank 1
        (1, "ran"): {2: pytest.approx(0.9)},
        (2, "waited"): {1: pytest.approx(1.9)},
    }
    assert waits.seconds[0, 1] == pytest.approx(1.9)

"""The report's step times and its picture: what is in the axes, not how it looks."""

from __future__ import annotations

import itertools
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest

from join import Join, JoinReport, rounds
from join.collectives import SingleCollective, ThreadCollective, run_threads
from join.report import RankReport
from join.report.rank_report import BINS, EDGES
from tests.ending import Ending
from tests.join.counter import Counter, Leading

STEPS = [2, 5, 0]


def report_of(collective: Any, steps: list[int], *, enable: bool = True) -> JoinReport:
    counter = Counter(collective)
    mine = steps[collective.rank]
    with Join([counter], enable) as join:
        for _ in range(mine):
            counter()
    return join.report


def rows(count: int) -> tuple[RankReport, ...]:
    times = (1, 2, *[0] * (BINS - 2))
    return tuple(RankReport(rank, 3, 4, 0.5, 2.0, 0.25, 8, 64, times) for rank in range(count))


def test_every_step_is_timed() -> None:
    for report in run_threads(3, lambda collective: report_of(collective, STEPS)):
        assert [sum(row.step_times) for row in report.ranks] == [row.steps for row in report.ranks] == STEPS
        assert all(len(row.step_times) == BINS for row in report.ranks)
        assert all(0 < row.joined_at <= row.ended_at for row in report.ranks)


def test_the_times_of_the_busiest_joinable_are_told() -> None:
    def rank_main(collective: ThreadCollective) -> JoinReport:
        often, seldom = Leading(collective, "often"), Leading(collective, "seldom")
        with Join([seldom, often]) as join:
            for _ in range(3):
                often()
            seldom()
        return join.report

    for report in run_threads(2, rank_main):
        assert [(row.steps, sum(row.step_times)) for row in report.ranks] == [(3, 3)] * 2


def looping(collective: ThreadCollective, announcing: bool) -> JoinReport:
    """Two loops, the second of which all ranks break out of."""
    counter = Counter(collective)
    with Join([counter]) as join:
        for last in (9, 1):
            for step, _ in enumerate(join.iterate(range(STEPS[collective.rank]))):
                if announcing and last == 9:
                    counter()
                if step == last:
                    break
    return join.report


@pytest.mark.parametrize("announcing", [False, True])
def test_loops_count_their_batches(announcing: bool) -> None:
    for report in run_threads(3, lambda collective: looping(collective, announcing)):
        assert [row.steps for row in report.ranks] == [4, 7, 0]
        assert [row.shadowed for row in report.ranks] == [3, 0, 7]
        assert report.steps == 7
        assert [sum(row.step_times) for row in report.ranks] == (STEPS if announcing else [0] * 3)


def test_a_rank_with_data_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait for a roll call takes 1,000 seconds."""
    seconds = itertools.count(step=1000)
    monkeypatch.setattr(rounds, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    for report in run_threads(3, lambda collective: looping(collective, False)):
        assert [row.idle >= 1000 for row in report.ranks] == [True, False, True]


def test_batches_are_not_timed() -> None:
    timeline, _, times = run_threads(3, lambda collective: looping(collective, False))[0].plot().axes
    assert [text.get_text() for text in timeline.texts] == ["4", "7", "", "3", "", "7"]
    assert "nothing\nwas announced" in times.texts[0].get_text()
    assert not times.patches


def step_times(monkeypatch: pytest.MonkeyPatch, took: float) -> list[int]:
    """Return the times of the one step of a block, which is announced so many seconds after the block was entered."""
    counter = Counter(SingleCollective())
    with Join([counter]) as join:
        entered = join.channel.roster.announcing[0].announced_at
        with monkeypatch.context() as context:
            context.setattr("join.protocol.channel.time", SimpleNamespace(monotonic=lambda: entered + took))
            counter()
    return list(join.report.ranks[0].step_times)


@pytest.mark.parametrize(("took", "place"), [(0.0, 0), (1e-6, 0), (1.01e-4, 0), (0.0101, 16), (99.0, BINS - 1)])
def test_a_time_falls_into_its_bin(monkeypatch: pytest.MonkeyPatch, took: float, place: int) -> None:
    assert step_times(monkeypatch, took) == [int(bin_ == place) for bin_ in range(BINS)]
    assert EDGES[place] <= took <= EDGES[place + 1] or place == 0


def test_a_time_beyond_the_last_edge_is_in_the_last_bin(monkeypatch: pytest.MonkeyPatch) -> None:
    assert step_times(monkeypatch, 1e9)[-1] == 1


def test_a_slow_step_is_told_from_fast_ones() -> None:
    def rank_main(collective: ThreadCollective) -> JoinReport:
        counter = Counter(collective)
        with Join([counter]) as join:
            for step in range(4):
                if step == 2:
                    time.sleep(0.2)
                counter()
        return join.report

    (report,) = run_threads(1, rank_main)
    slow = [count for count, edge in zip(report.ranks[0].step_times, EDGES[1:], strict=True) if edge > 0.2]
    assert sum(slow) == 1


def test_the_axes_hold_the_report() -> None:
    report = run_threads(3, lambda collective: report_of(collective, STEPS))[0]
    figure = report.plot()
    timeline, idle, times = figure.axes
    active, shadowing = timeline.containers
    assert [bar.get_width() for bar in active] == pytest.approx([row.joined_at for row in report.ranks])
    assert [bar.get_x() for bar in shadowing] == pytest.approx([row.joined_at for row in report.ranks])
    ends = [bar.get_x() + bar.get_width() for bar in shadowing]
    assert ends == pytest.approx([row.ended_at for row in report.ranks])
    texts = [text.get_text() for text in timeline.texts]
    assert texts == ["2", "5", "", "3", "", "5"]  # steps by rank, then shadowed ones
    assert [bar.get_height() for bar in idle.containers[0]] == pytest.approx([row.idle for row in report.ranks])
    assert not idle.texts
    lines = {line.get_label(): sum(line.get_data().values) for line in times.patches}
    assert lines == {"rank 0": 2, "rank 1": 5}
    assert [axis.get_title() for axis in figure.axes] == ["Who was active when", "Idle", "Step times"]


def test_one_process_and_no_process(tmp_path: Path) -> None:
    single = SingleCollective()
    figure = report_of(single, [3]).plot(tmp_path / "one.png")
    assert [text.get_text() for text in figure.axes[0].texts] == ["3", ""]
    empty = report_of(single, [3], enable=False).plot(tmp_path / "none.png")
    assert "enable=False" in empty.get_suptitle()
    assert not empty.axes[2].patches


def test_many_ranks_share_one_line(tmp_path: Path) -> None:
    timeline, _, times = JoinReport(rows(64), even=False).plot(tmp_path / "many.svg").axes
    assert len(timeline.containers[0]) == 64
    assert not timeline.texts
    assert [line.get_label() for line in times.patches] == ["all ranks"]
    assert list(times.patches[0].get_data().values[:3]) == [64, 128, 0]


def test_a_picture_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = JoinReport(rows(2), even=True)
    report.plot(str(tmp_path / "report.png"))
    assert [each.name for each in tmp_path.iterdir()] == ["report.png"]
    whole = (tmp_path / "report.png").read_bytes()
    assert whole.startswith(b"\x89PNG")

    from matplotlib.figure import Figure

    def half(self: Figure, file: BinaryIO, **_: Any) -> None:
        file.write(b"half")
        assert (tmp_path / "report.png").read_bytes() == whole  # it is not this file that is being written
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", half)
    with pytest.raises(OSError, match="disk full"):
        report.plot(tmp_path / "report.png")
    assert [each.name for each in tmp_path.iterdir()] == ["report.png"]
    assert (tmp_path / "report.png").read_bytes() == whole


def plots(rank: int, file: str) -> list[bool]:
    """Whether pyplot is there before and after."""
    before = "matplotlib.pyplot" in sys.modules
    warnings.simplefilter("error")
    JoinReport(rows(2), True).plot(file)
    return [before, "matplotlib.pyplot" in sys.modules]


def test_plotting_leaves_pyplot_alone(ending: Ending, tmp_path: Path) -> None:
    assert ending.run(plots, str(tmp_path / "x.pdf"), ranks=1, group=False) == [[False, False]]


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ImportError, match=r'^report\.plot\(\) needs matplotlib, .* Run pip install "joinables\[plot\]"\. \[J098\]$'
    ):
        JoinReport(rows(1)).plot()

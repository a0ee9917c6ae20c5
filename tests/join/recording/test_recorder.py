"""``join.trace``: where it writes, what a rank that fails leaves, and what is left of it: nothing."""

from __future__ import annotations

import itertools
import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from join import Burst, Join, JoinError, PeerError
from join.collectives import SingleCollective, ThreadCollective, run_threads
from join.joinable import BurstState
from join.recording import recorder as recorder_module
from join.recording.recorder import Recorder
from join.recording.states import leave_alone, watch
from joinables.trainer._shared_call import SharedCall
from tests.join.counter import Counter, Leading, group_works

COUNTS = (3, 5, 0)
ROOM = str(Path(recorder_module.__file__).parent)


def parts(path: Path, ranks: int = 3) -> list[dict[str, Any]]:
    return [json.loads(path.with_name(f"{path.stem}.rank{rank}.json").read_text()) for rank in range(ranks)]


def kinds_of(part: dict[str, Any], *wanted: str) -> list[tuple[str, Any, Any]]:
    return [(kind, what, number) for kind, _, _, what, number in part["events"] if kind in wanted]


def test_joinables_that_do_not_tell_when_they_run(tmp_path: Path) -> None:
    def rank_main(collective: ThreadCollective) -> tuple[int, int]:
        leading, follower = Leading(collective), Counter(collective)
        with Join([leading, follower]) as join:
            join.trace(tmp_path / "run.json")
            for _ in range(COUNTS[collective.rank]):
                leading()
                follower()
        return leading.inner.total, follower.total

    assert run_threads(3, rank_main) == [(8, 8)] * 3
    for part, count in zip(parts(tmp_path / "run.json"), COUNTS, strict=True):
        assert part["joinables"] == ["leading", "Counter"]
        own = [each for number in range(1, count + 1) for each in (("announced", 0, number), ("ran", 1, None))]
        others = [("shadowed", 0, number) for number in range(count + 1, 6)]
        assert kinds_of(part, "announced", "ran", "shadowed") == own + others
        assert (part["announced"], part["shadowed"]) == ([count, 0], [5 - count, 0])


def test_waiting_for_a_slow_rank(tmp_path: Path) -> None:
    def rank_main(collective: ThreadCollective) -> None:
        counter = Counter(collective)
        with Join([counter]) as join:
            join.trace(tmp_path / "run.json")
            for _ in range(2 if collective.rank == 1 else 0):
                time.sleep(0.2)
                counter()

    run_threads(2, rank_main)
    waits = [event for event in parts(tmp_path / "run.json", 2)[0]["events"] if event[0] == "waited"]
    assert [event[4] for event in waits[:2]] == [1, 2]  # the headers
    assert all(end - begin > 0.1 for _, begin, end, _, _ in waits[:2])


def fails(collective: ThreadCollective, path: Path, fail: Callable[[], None]) -> str:
    """The error with which a rank leaves a block in which rank 1 does something in its second step."""
    calls = itertools.count()

    def call() -> None:
        if collective.rank == 1 and next(calls) == 1:
            fail()

    shared = SharedCall(call, collective)
    try:
        with Join([shared]) as join:
            join.trace(path)
            for _ in range(COUNTS[collective.rank]):
                shared()
    except (ValueError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_failed_block_is_recorded_too(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("oh no")

    errors = run_threads(3, lambda collective: fails(collective, tmp_path / "run.json", fail))
    told = parts(tmp_path / "run.json")
    assert errors[1] == told[1]["error"] == "ValueError: oh no"
    for rank in (0, 2):
        assert errors[rank].startswith("PeerError: rank 1 failed: ValueError: oh no")
        assert told[rank]["error"] == errors[rank]
    assert kinds_of(told[1], "announced", "ran", "unfinished") == [
        ("announced", 0, 1), ("ran", 0, 1), ("announced", 0, 2), ("unfinished", 0, 2),
    ]  # fmt: skip
    assert kinds_of(told[2], "shadowed")[0] == ("shadowed", 0, 1)


class Calls:
    """Counts calls of functions of the recorder, as the profile function of a thread."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        self.count += event == "call" and frame.f_code.co_filename.startswith(ROOM)


def count_calls(collective: ThreadCollective, path: Path | None) -> tuple[int, list[str]]:
    """How often the recorder is called in a block, and what is replaced in the channel in it."""
    counter, calls = Counter(collective), Calls()
    sys.setprofile(calls)
    try:
        with Join([counter]) as join:
            if path is not None:
                join.trace(path)
            replaced = sorted({"announce", "follow", "shadow_member", "drain"} & vars(join.channel).keys())
            for _ in range(COUNTS[collective.rank]):
                counter()
    finally:
        sys.setprofile(None)
    return calls.count, replaced


def test_an_untraced_block_calls_nothing_of_it(tmp_path: Path) -> None:
    assert run_threads(3, lambda collective: count_calls(collective, None)) == [(0, [])] * 3
    assert not list(tmp_path.iterdir())
    traced = run_threads(3, lambda collective: count_calls(collective, tmp_path / "run.json"))
    assert all(count > 5 and len(replaced) == 4 for count, replaced in traced)  # so it would be seen
    assert run_threads(3, lambda collective: count_calls(collective, None)) == [(0, [])] * 3


def test_everything_is_put_back(tmp_path: Path) -> None:
    def rank_main(collective: ThreadCollective) -> tuple[bool, bool]:
        outer, inner = Leading(collective, "outer"), Leading(collective, "inner")
        with Join([outer]) as around:
            before = [set(vars(each)) for each in (around.channel, around.channel.headers, around.channel.guard)]
            with Join([inner]) as join:
                join.trace(tmp_path / "run.json")
                inner()
            after = [set(vars(each)) for each in (around.channel, around.channel.headers, around.channel.guard)]
            outer()
        return before == after, "state" in vars(outer)

    assert run_threads(2, rank_main) == [(True, False)] * 2
    assert vars(Burst)["state"] is BurstState.IDLE
    assert parts(tmp_path / "run.json", 2)[0]["joinables"] == ["outer", "inner"]


def test_states_are_the_same_while_somebody_watches() -> None:
    one, other = (Leading(None, name) for name in ("one", "other"))
    seen: list[tuple[BurstState, BurstState]] = []
    one.state = BurstState.PENDING
    watch(one, lambda before, after: seen.append((before, after)))
    watch(other, lambda before, after: None)
    assert (one.state, other.state, Burst.state) == (BurstState.PENDING, BurstState.IDLE, BurstState.IDLE)
    one.state = one.state = BurstState.RUNNING
    leave_alone(one)
    one.state = BurstState.IDLE
    leave_alone(other)
    leave_alone(other)
    assert seen == [(BurstState.PENDING, BurstState.RUNNING)]
    assert one.state is vars(one)["state"] is vars(Burst)["state"] is BurstState.IDLE


BAD = {
    "no/run.json": (FileNotFoundError, "there is no folder 'no'; make it first"),
    "run.txt": (ValueError, r"path='run.txt' does not end in \.json; give a name such as"),
    "run": (ValueError, "does not end in"),
    3: (TypeError, "path=3 is a int; give the name of a file, such as 'run.json'"),
}


@pytest.mark.parametrize("path", BAD)
@pytest.mark.parametrize("enable", [True, False])
def test_a_bad_path_is_told_before_any_collective(path: Any, enable: bool) -> None:
    kind, text = BAD[path]

    def rank_main(collective: ThreadCollective) -> int:
        counter = Counter(collective)
        with Join([counter], enable) as join:
            issued = collective.issued(), collective.companion().issued()
            with pytest.raises(kind, match=text):
                join.trace(path)
            assert (collective.issued(), collective.companion().issued()) == issued
            for _ in range(COUNTS[collective.rank] if enable else 2):
                counter()
        group_works(collective)
        return counter.total

    assert run_threads(3, rank_main) == [8 if enable else 6] * 3


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    single = SingleCollective()
    single.setup(0, 1)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # to root, everything is open
    with Join([Counter(single)]) as join, pytest.raises(PermissionError, match="nothing can be written in"):
        join.trace(tmp_path / "run.json")


def test_where_it_does_not_belong(tmp_path: Path) -> None:
    path = tmp_path / "run.json"

    def rank_main(collective: ThreadCollective) -> None:
        counter = Counter(collective)
        join = Join([counter])
        with pytest.raises(JoinError, match="is for the inside of a block"):
            join.trace(path)
        with join:
            for _ in join.iterate(range(2)):
                with pytest.raises(JoinError, match="call it before the loop"):
                    join.trace(path)
            join.trace(path)
            with pytest.raises(JoinError, match="being recorded already"):
                join.trace(path)
            with Join([Counter(collective)]) as inner, pytest.raises(JoinError, match="being recorded already"):
                inner.trace(path)
        with pytest.raises(JoinError, match="is for the inside of a block"):
            join.trace(path)

    run_threads(2, rank_main)
    assert len(list(tmp_path.iterdir())) == 2


def test_nothing_is_written_with_enable_false(tmp_path: Path) -> None:
    single = SingleCollective()
    single.setup(0, 1)
    with Join([Counter(single)], enable=False) as join:
        join.trace(tmp_path / "run.json")
    assert not list(tmp_path.iterdir())


def one_process(path: Path, steps: int) -> None:
    single = SingleCollective()
    single.setup(0, 1)
    counter = Counter(single)
    with Join([counter]) as join:
        join.trace(str(path))
        for _ in range(steps):
            counter()


def test_the_newest_events_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MOST_EVENTS", 10)
    one_process(tmp_path / "run.json", 20)
    (part,) = parts(tmp_path / "run.json", 1)
    assert len(part["events"]) == 10
    assert part["left_out"] == 20 + 21 + 1 - 10  # announcements, headers, and the end
    assert part["announced"] == [20]
    assert kinds_of(part, "announced")[-1] == ("announced", 0, 20)


def test_a_file_that_cannot_be_written_in_the_end_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", full)
    with caplog.at_level(logging.WARNING, "join"):
        one_process(tmp_path / "run.json", 2)
    assert [each.getMessage() for each in caplog.records] == [
        f"the trace could not be written to {tmp_path / 'run.rank0.json'}: disk full"
    ]
    assert not list(tmp_path.iterdir())


def test_what_an_earlier_run_has_left_is_gone_at_once(tmp_path: Path) -> None:
    old = tmp_path / "run.rank0.json"
    old.write_text("old")
    single = SingleCollective()
    single.setup(0, 1)
    with Join([Counter(single)]) as join:
        join.trace(tmp_path / "run.json")
        assert not old.exists()  # a process that is killed here leaves no file
    assert Recorder.__name__ not in old.read_text() and json.loads(old.read_text())["world_size"] == 1

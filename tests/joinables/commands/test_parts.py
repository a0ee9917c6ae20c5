"""Reading what ranks have written: which files, and on one clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from joinables.commands.parts import TraceError, read
from tests.joinables.commands.made import COUNTS, record, write


@pytest.mark.parametrize("name", ["run.json", "run.rank1.json"])
def test_a_run(tmp_path: Path, name: str) -> None:
    record(tmp_path / "run.json")
    run = read(tmp_path / name)
    assert (run.path, run.world_size, list(run.parts), run.remarks) == (tmp_path / "run.json", 3, [0, 1, 2], [])
    for part, count in zip(run.parts.values(), COUNTS, strict=True):
        assert (part.announced, part.shadowed, part.error) == (count, 5 - count, None)
        announced = [event for event in part.events if event.kind == "announced"]
        assert [(event.what, event.number) for event in announced] == [
            ("the call of <leading> & co", step + 1) for step in range(count)
        ]
        assert run.ended >= part.ended >= max(event.end for event in part.events)
        assert min(event.begin for event in part.events) >= 0


def test_joinables_of_one_name_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write(path, 0, [["ran", 0, 1, at, 1] for at in range(3)], world_size=1, joinables=["Linear", "Adam", "Linear"])
    assert [event.what for event in read(path).parts[0].events] == ["Linear (1)", "Adam", "Linear (2)"]


def test_there_is_nothing(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(TraceError, match=r"there is no .*run\.rank0\.json: call join\.trace\('run\.json'\)"):
            read(folder / "run.json")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is no JSON"),
        ("[]", r"is no trace; give the path that join\.trace was given"),
        ('{"format": "other"}', r"is no trace; give the path that join\.trace was given"),
    ],
)
def test_other_files(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "run.rank0.json").write_text(text)
    with pytest.raises(TraceError, match=told):
        read(tmp_path / "run.json")


def test_another_version(tmp_path: Path) -> None:
    write(tmp_path / "run.json", 0, [], version=99)
    with pytest.raises(TraceError, match="another version of joinables"):
        read(tmp_path / "run.json")


def test_what_is_told_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write(path, 0, [], world_size=3, error="ValueError: oh", left_out=7)
    write(path, 5, [], world_size=6, entered=10.0)
    run = read(path)
    assert list(run.parts) == [0]
    assert [remark.partition(":")[0] for remark in run.remarks] == [
        "1 files of a run with another number of ranks were left out",
        "rank 0 left the block with ValueError",
        "rank 0 has kept its newest events",
        "nothing is there of ranks 1, 2",
    ]


def sent(*times: float) -> list[list[Any]]:
    return [["sent", at, at, None, number + 1] for number, at in enumerate(times)]


# Rank 1 sends each header 0.01 s after rank 0 has.
FIRST = (1.0, 2.0, 3.0, 4.0)


@pytest.mark.parametrize(
    ("entered", "times", "shift", "told"),
    [
        (1000.5, [at - 0.49 for at in FIRST], 0.5, []),  # it entered later
        (1007.0, [at + 0.01 for at in FIRST], 0.99, ["the clock of rank 1 was corrected by -6010.0 ms"]),
        (993.0, [at + 0.01 for at in FIRST], -1.01, ["the clock of rank 1 was corrected by 5990.0 ms"]),
        (
            1000.0,
            [1.0, 1.1, 9.0, 9.1],
            0.0,
            ["the files of ranks 0 and 1 do not fit together: they may be of different runs"],
        ),
    ],
)
def test_clocks(tmp_path: Path, entered: float, times: list[float], shift: float, told: list[str]) -> None:
    path = tmp_path / "run.json"
    write(path, 0, sent(*FIRST))
    write(path, 1, sent(*times), entered=entered)
    run = read(path)
    assert run.remarks == told
    begins = [[event.begin for event in part.events] for part in run.parts.values()]
    if "do not fit" not in "".join(told):
        assert begins[1][0] - begins[0][0] == pytest.approx(times[0] - FIRST[0] + shift)
        for one, other in ((0, 1), (1, 0)):  # none sends a header before all have sent the one before
            assert all(later >= earlier - 1e-9 for earlier, later in zip(begins[one], begins[other][1:], strict=False))
    assert min(min(each) for each in begins) >= 0

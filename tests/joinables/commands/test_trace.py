"""``python -m joinables trace``: the page, and the file for Perfetto."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from joinables.__main__ import main
from joinables.commands.parts import read
from joinables.commands.waits import waits_of
from tests.joinables.commands.made import COUNTS, record, write

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Reads a page: its text by tag, and the attributes that lead elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.links: list[str | None] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attrs if name in ("src", "href", "action", "data")]
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in self.open:
            self.texts[tag][-1] += data


@pytest.fixture
def made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The files of a run."""
    record(tmp_path / "run.json")
    assert main(["trace", str(tmp_path / "run.json")]) == 0
    written = [str(tmp_path / name) for name in ("run.html", "run.perfetto.json")]
    assert capsys.readouterr().out.splitlines() == written
    return tmp_path


def test_the_page_needs_nothing_else(made: Path) -> None:
    text = (made / "run.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert page.links == ["data:,"]  # no icon to be asked for
    assert not re.search(r"https?:|//[a-z]|@import|url\(|{{", text)
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text
    (title,) = page.texts["title"]
    assert title.startswith("run.json: 3 ranks, ")


def test_the_page_has_the_run(made: Path) -> None:
    page, run = Page((made / "run.html").read_text(encoding="utf-8")), read(made / "run.json")
    data = json.loads(page.texts["script"][0])
    for row, (rank, part) in zip(data["ranks"], run.parts.items(), strict=True):
        assert row["rank"] == rank
        told = [(data["kinds"][kind], data["texts"][text], number) for kind, _, _, text, number, *_ in row["events"]]
        assert told == [(event.kind, event.what, event.number) for event in part.events]
        for _, begin, end, *_ in row["events"]:
            assert 0 <= begin <= end <= data["ended"]
    waits = [(row["rank"], event[5]) for row in data["ranks"] for event in row["events"] if len(event) > 5]
    assert sorted(waits) == sorted((wait.rank, wait.on) for wait in waits_of(run).all)
    cells, heads = page.texts["td"], page.texts["th"]
    assert heads[:3] == ["rank", "announced", "shadowed"]
    assert [(cells[6 * rank], cells[6 * rank + 1]) for rank in range(3)] == [
        (str(count), str(5 - count)) for count in COUNTS
    ]
    assert "for rank 1" in heads
    assert page.texts["h2"] == ["Timeline", "Ranks", "Who waits for whom", "Header latency"]


def test_names_are_no_markup(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    name = "</script><b>{{DATA}}"
    write(path, 0, [["ran", 0, 1, 0, 1]], world_size=1, joinables=[name], error=f"E: {name}", host=name)
    assert main(["trace", str(path)]) == 0
    page = Page((tmp_path / "run.html").read_text(encoding="utf-8"))
    assert "b" not in page.texts
    assert json.loads(page.texts["script"][0])["texts"] == [name]
    assert page.texts["td"][-2:] == [f"{name}, process 100", f"E: {name}"] and name in page.texts["p"][0]


def test_a_run_without_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "run.json", 0, [], error="ValueError: oh")
    page, other = tmp_path / "page.html", tmp_path / "page.perfetto.json"
    assert main(["trace", str(tmp_path / "run.json"), "--out", str(page)]) == 0
    remarks = capsys.readouterr().out.splitlines()
    assert remarks[0] == "rank 0 left the block with ValueError: oh"
    assert remarks[-2:] == [str(page), str(other)]
    text = page.read_text(encoding="utf-8")
    assert "No rank was seen to wait" in text and "No rank has waited for a header" in text and remarks[1] in text


def test_perfetto(made: Path) -> None:
    told: dict[str, Any] = json.loads((made / "run.perfetto.json").read_text(encoding="utf-8"))
    about = [event for event in told["traceEvents"] if event["ph"] == "M"]
    events = told["traceEvents"][len(about) :]
    assert {(event["pid"], event["args"]["name"]) for event in about if event["name"] == "thread_name"} == {
        (rank, name) for rank in range(3) for name in ("steps", "bursts", "waits", "messages")
    }
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    run = read(made / "run.json")
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == sum(len(part.events) for part in run.parts.values())
    for event in slices:
        assert event["pid"] in range(3) and event["tid"] in range(4)
        assert event["ts"] >= 0 and event["dur"] > 0
    flows = [event for event in events if event["ph"] in "sf"]
    assert len(events) == len(slices) + len(flows)
    waits = waits_of(run).all
    ends = {(event["ph"], event["id"]): event["pid"] for event in flows}
    assert waits and ends == {
        (end, number): rank for number, wait in enumerate(waits) for end, rank in (("s", wait.on), ("f", wait.rank))
    }


def test_what_is_not_there_is_one_sentence() -> None:
    command = [sys.executable, "-m", "joinables", "trace", "none/run.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    told = "joinables trace: there is no none/run.rank0.json: call join.trace('run.json') in the block"
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.startswith(told)


def test_without_a_command_it_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert re.search(r"\n  +trace .*\n  +doctor ", capsys.readouterr().out)

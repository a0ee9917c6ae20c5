"""Answers on the command line, and in the notes of errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import joinables
from docs.errors import COPY, EXAMPLES, HEIRS, PAGE, texts
from join import Join
from joinables.explain import explain
from tests.ending import Ending
from tests.harness import Pool, in_test_all

ROOT = Path(joinables.__file__).parent.parent


@cache
def codes() -> list[str]:
    """All codes, sorted; not where all workers would look for them, as they collect the tests."""
    return sorted({code for text in texts() for code in text.codes})


def test_each_code_is_explained() -> None:
    assert COPY.read_text() == PAGE.read_text(), "run python -m docs.errors"
    for code in codes():
        text = explain(code)
        assert text and text.startswith(f"{code}\n") and "###" not in text and "&lt;" not in text
        assert len(text.splitlines()) < 30
    assert "[J013]" in (explain("j013") or "") and "```python" in (explain("J013") or "")


def test_a_code_of_an_earlier_version_leads_to_its_heir() -> None:
    for code, heir in HEIRS.items():
        assert (explain(code) or "").endswith(explain(heir) or "?")


@pytest.mark.parametrize("code", ["J000", "J9", "", "Errors", ".*"])
def test_there_is_nothing_to_say(code: str) -> None:
    assert explain(code) is None


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "joinables", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)


@in_test_all
def test_the_command() -> None:
    done = run("explain", "[J441]")
    assert (done.returncode, done.stdout.splitlines()[0], done.stderr) == (0, "J441", "")
    done = run("explain", "J000")
    assert (done.returncode, done.stdout) == (1, "") and "No error has the code J000" in done.stderr


@in_test_all
@pytest.mark.timeout(300)
def test_the_check_does_not_begin_with_a_warning_about_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\")")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    done = run("check")
    assert done.returncode == 0 and "NumPy" not in done.stdout + done.stderr
    assert done.stderr.strip().startswith("(training two ranks")


def errors(rank: int) -> Iterator[BaseException]:
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="lists no object") as caught:
        Join([optimizer])
    yield caught.value
    lists = [model, optimizer] if rank else [optimizer, model]
    with pytest.raises(RuntimeError, match=r"the same objects, whose order differs \(ranks \[0\]: .*J020") as entering:
        Join(lists).open()
    yield entering.value


def notes_of(rank: int) -> list[list[str]]:
    return [getattr(error, "__notes__", []) for error in errors(rank)]


@in_test_all
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no notes")
def test_errors_name_the_command(pool: Pool) -> None:
    expected = [[f"More about it: python -m joinables explain {code}"] for code in ("J013", "J020")]
    assert pool.run(notes_of, ranks=2) == [expected] * 2


def schedule(rank: int) -> list[str]:
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2)
    with pytest.raises(ValueError, match="Tried to step") as caught, Join([model, optimizer, scheduler]) as block:
        for x in block.iterate([torch.ones(1, 2)] * 4):
            model(x).sum().backward()
            optimizer.step()
            scheduler.step()
    return getattr(caught.value, "__notes__", [])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no notes")
def test_a_schedule_that_is_too_short_names_steps(pool: Pool) -> None:
    (notes,) = pool.run(schedule, ranks=1)
    assert any("joinables.steps(loader)" in note for note in notes)


def without_a_group(rank: int) -> str:
    dist.destroy_process_group()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="J013") as caught:
        patch.setenv("WORLD_SIZE", "2")
        Join([torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)])
    return str(caught.value)


def test_a_missing_process_group_is_named(ending: Ending) -> None:
    (text,) = ending.run(without_a_group, ranks=1)
    assert "There is no process group yet: call torch.distributed.init_process_group first. Add" in text


def test_examples_have_a_section() -> None:
    assert set(EXAMPLES) <= set(codes())

"""The README is short, its code runs as it stands, and what it points to is there."""

from __future__ import annotations

import re
import shlex
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import join
from join.collectives import collective_of
from tests.ending import Ending
from tests.models import TOLERANCE, batch, build
from tests.pool import Pool
from tests.scripts import TORCHRUN, run_forked

ROOT = Path(join.__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
WORDS, LINES = 1200, 15
COUNTS = 1, 3  # batches in each epoch, by rank


def test_it_is_short() -> None:
    assert len(TEXT.split()) <= WORDS


def test_each_block_has_a_test() -> None:
    """The script, the command that runs it, and the difference between two loops."""
    assert [language for language, _ in BLOCKS] == ["python", "sh", "diff"]
    assert not re.search(r"^(    |\t)", re.sub(r"^```.*?^```$", "", TEXT, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)


def test_the_script_runs_as_pasted(ending: Ending, tmp_path: Path) -> None:
    (_, script), (_, command), _ = BLOCKS
    assert len([line for line in script.splitlines() if line]) <= LINES
    (tmp_path / "train.py").write_text(script)
    python, *arguments = shlex.split(command)
    assert python == "python"
    assert arguments[:2] == ["-m", TORCHRUN]
    # A port that is free, where the command takes a certain one.
    printed = run_forked(ending, TORCHRUN, "--standalone", *arguments[2:], folder=tmp_path)
    # Two ranks may print on one line.
    differences = [float(number) for number in re.findall(r"difference: ([\d.e+-]+)", printed)]
    assert len(differences) == 2
    assert max(differences) < 1e-6


def loop(rank: int, code: str, limited: bool) -> tuple[str, list[torch.Tensor]]:
    """Run one of the two loops, and tell what it raised and where the parameters ended."""
    if limited:
        collective_of(None).limit(timedelta(seconds=3))
    model = DistributedDataParallel(build("mlp"))
    names: dict[str, Any] = {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.01)}
    names |= {"loss_fn": torch.nn.functional.mse_loss, "loader": [batch(rank, 0, step) for step in range(COUNTS[rank])]}
    try:
        exec(code, names)
    except RuntimeError as error:
        return str(error), []
    return "", [parameter.detach() for parameter in model.parameters()]


def in_one_process() -> list[torch.Tensor]:
    model = build("mlp")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        for step in range(max(COUNTS)):
            ranks = [batch(rank, 0, step) for rank, count in enumerate(COUNTS) if step < count]
            x, y = (torch.cat(each) for each in zip(*ranks, strict=True))
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_two_lines_are_new_and_make_the_loop_right(pool: Pool) -> None:
    lines = BLOCKS[2][1].splitlines()
    assert len([line for line in lines if line.startswith("+") and line != "+"]) == 2
    code = "\n".join(line[1:] for line in lines)
    for told, parameters in pool.run(loop, code, False, ranks=2):
        assert not told
        torch.testing.assert_close(parameters, in_one_process(), atol=TOLERANCE, rtol=0)


def test_without_them_it_hangs(pool: Pool) -> None:
    """Until the time limit of the group, which is half an hour elsewhere."""
    code = "\n".join(line[1:] for line in BLOCKS[2][1].splitlines() if not line.startswith("+"))
    results = pool.run(loop, code, True, ranks=2)
    assert not results[0][0]
    assert "imed out" in results[1][0]


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


LINKS = re.findall(r"\]\(([^)]+)\)", TEXT)


@pytest.mark.parametrize("link", LINKS)
def test_what_it_points_to_is_there(link: str) -> None:
    path, _, anchor = link.partition("#")
    assert (ROOT / path).exists()
    assert not anchor or anchor in anchors((ROOT / path).read_text())


def test_all_targets_of_make_are_in_it() -> None:
    (targets,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    rows = TEXT.partition("| `make` |")[2].partition("\n\n")[0]
    told = {
        name.split()[0]
        for name in re.findall(r"`([^`]+)`", "".join(row.split("|")[1] for row in rows.splitlines()[2:]))
    }
    assert told == set(targets.split()) - {"help"}


@pytest.mark.parametrize("file", sorted(set(re.findall(r"`(tests/[\w/.]+)`", TEXT))))
def test_tests_that_it_names_exist(file: str) -> None:
    assert (ROOT / file).exists()

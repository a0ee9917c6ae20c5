"""The code of the README and of the first page runs as pasted, shows true output, and links lead somewhere."""

from __future__ import annotations

import re
import shlex
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import join
from join.collectives import collective_of
from joinables.check import check
from tests.ending import Ending
from tests.models import TOLERANCE, batch, build
from tests.pool import Pool
from tests.scripts import TORCHRUN, run_forked

ROOT = Path(join.__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
START = (ROOT / "docs" / "start.md").read_text()
COUNTS = 1, 3  # batches in each epoch, by rank


def test_each_block_has_a_test() -> None:
    """Two loops and their difference; the proof in one command and what it prints; two tracebacks."""
    assert [language for language, _ in BLOCKS] == ["diff", "sh", "text", "text", "text"]
    assert not re.search(r"^(    |\t)", re.sub(r"^```.*?^```$", "", TEXT, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)


def test_getting_started_runs_as_pasted(ending: Ending, tmp_path: Path) -> None:
    """Its script prints what the page shows, but for times."""
    blocks = dict(re.findall(r"^```(\w*)\n(.*?)^```$", START, re.DOTALL | re.MULTILINE))
    (tmp_path / "train.py").write_text(blocks["python"])
    python, *arguments = shlex.split(blocks["sh"])
    assert python == "python"
    assert arguments[:2] == ["-m", TORCHRUN]
    # A port that is free, where the command takes a certain one.
    printed = run_forked(ending, TORCHRUN, "--standalone", *arguments[2:], folder=tmp_path)
    # Two ranks may print on one line.
    differences = [float(number) for number in re.findall(r"difference ([\d.]+e[+-]\d+)", printed)]
    assert len(differences) == 2
    assert max(differences) < 1e-6
    for row in re.findall(r"^ +\d+ .*$", blocks["text"], re.MULTILINE):
        rank, steps, shadowed, *_ = row.split()
        assert re.search(rf"^ +{rank} +{steps} +{shadowed} ", printed, re.MULTILINE)


def test_the_check_prints_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """But for versions, addresses and the difference itself."""
    assert shlex.split(BLOCKS[1][1]) == ["python", "-m", "joinables", "check"]
    shown = [line.split()[1:3] for line in BLOCKS[2][1].splitlines()]
    assert check() == 0
    assert [line.split()[1:3] for line in capsys.readouterr().out.splitlines()] == shown


def failing(rank: int, code: str) -> list[str]:
    """Run the loop of two lines more; the loader of rank 1 raises. The lines of the traceback."""

    def loader() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for step in range(3 + rank):
            if (rank, step) == (1, 2):
                raise ValueError("image 17 is truncated")
            yield batch(rank, 0, step)

    model = DistributedDataParallel(build("mlp"))
    names: dict[str, Any] = {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.01)}
    names |= {"loss_fn": torch.nn.functional.mse_loss, "loader": loader()}
    try:
        exec(code, names)
    except Exception:
        return traceback.format_exc().splitlines()
    return []


def test_tracebacks_end_as_they_are_shown(ending: Ending) -> None:
    code = "\n".join(line[1:] for line in BLOCKS[0][1].splitlines())
    zero, one = ending.run(failing, code, ranks=2)
    shown_of_one, shown_of_zero = (block.splitlines()[-1].partition(" ")[2] for _, block in BLOCKS[3:])
    assert one[-1] == shown_of_one
    assert zero[-1] == shown_of_zero


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
    lines = BLOCKS[0][1].splitlines()
    assert len([line for line in lines if line.startswith("+") and line != "+"]) == 2
    code = "\n".join(line[1:] for line in lines)
    for told, parameters in pool.run(loop, code, False, ranks=2):
        assert not told
        torch.testing.assert_close(parameters, in_one_process(), atol=TOLERANCE, rtol=0)


def test_without_them_it_hangs(pool: Pool) -> None:
    """Until the time limit of the group, which is half an hour elsewhere."""
    code = "\n".join(line[1:] for line in BLOCKS[0][1].splitlines() if not line.startswith("+"))
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


def test_contributing_has_all_targets_of_make() -> None:
    (targets,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    listed = re.findall(r"^    make ([\w-]+)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert set(listed) == set(targets.split()) - {"help"}


@pytest.mark.parametrize("file", sorted(set(re.findall(r"`(tests/[\w/.]+)`", TEXT))))
def test_tests_that_it_names_exist(file: str) -> None:
    assert (ROOT / file).exists()

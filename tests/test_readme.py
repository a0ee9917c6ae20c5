"""The README: its loop hangs without the two lines and is right with them, its output is real, its links work."""

from __future__ import annotations

import functools
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
from joinables import check
from joinables.testing import assert_equals_one_process
from tests.ending import Ending
from tests.examples import examples_of
from tests.harness import Pool, in_test_all
from tests.scripts import TORCHRUN, as_script, run_forked
from tests.training import TOLERANCE, batch, build, mlp_in_one_process
from tests.versions import needs_gloo_with_limits, needs_silent_gloo

ROOT = Path(join.__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
LOOPS, INSTALL, LAST_LINE, FAILED = (code for _, code in BLOCKS)
ADDRESS = re.findall(r"Source = (.*)", (ROOT / "setup.cfg").read_text())
WORDS, FIRST_SCREEN = 1000, 330
COUNTS = 1, 3  # batches in each epoch, by rank
FAILING = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from joinables import Join


def loader(rank):
    for number in range(100):
        if (rank, number) == (2, 7):
            raise ValueError("sample 1207 is not an image")
        yield torch.randn(8, 4), torch.randn(8, 1)


rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters())
with Join([model, optimizer], divide_by_initial_world_size=False):
    for x, y in loader(rank):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
"""
"""A script that fails as the README shows. The tracebacks have the numbers of its lines."""


def test_each_block_has_a_test() -> None:
    """Two loops and their difference; the installation; the proof; what failed ranks print."""
    assert [language for language, _ in BLOCKS] == ["diff", "sh", "text", "text"]
    assert not re.search(r"^(    |\t)", re.sub(r"^```.*?^```$", "", TEXT, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)


def test_a_newcomer_reads_it_all() -> None:
    """The first screen has the picture, the two lines, the comparison, the address to clone and the status."""
    assert len(TEXT.split()) <= WORDS
    first, heading, _ = TEXT.partition("\n## ")
    assert heading and len(first.split()) <= FIRST_SCREEN
    order = ["# joinables", "pictures/two_ranks.svg", "```diff", "`model.join()`", "git clone ", "Status: alpha"]
    assert sorted(order, key=first.index) == order
    assert INSTALL.splitlines()[0].split() == ["git", "clone", *ADDRESS]


# -- the loop ---------------------------------------------------------------------------------------------------------


def loop(rank: int, code: str, limited: bool) -> tuple[str, list[torch.Tensor]]:
    """Run one of the two loops; return the text of its error, and the parameters at its end."""
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


def test_two_lines_are_new_and_make_the_loop_right(pool: Pool) -> None:
    lines = LOOPS.splitlines()
    assert len([line for line in lines if line.startswith("+") and line != "+"]) == 2
    code = "\n".join(line[1:] for line in lines)
    for error, parameters in pool.run(loop, code, False, ranks=2):
        assert not error
        torch.testing.assert_close(parameters, mlp_in_one_process(COUNTS, epochs=2, lr=0.01), atol=TOLERANCE, rtol=0)


@in_test_all
@needs_gloo_with_limits
def test_without_them_it_hangs(pool: Pool) -> None:
    """Until the timeout of the process group expires: 3 seconds here, half an hour elsewhere."""
    code = "\n".join(line[1:] for line in LOOPS.splitlines() if not line.startswith("+"))
    results = pool.run(loop, code, True, ranks=2)
    assert not results[0][0]
    assert "imed out" in results[1][0]


# -- the output -------------------------------------------------------------------------------------------------------


def forked_check(rank: int) -> None:
    """Run the check; its ranks are forked, so that they need not import torch."""
    check.assert_equals_one_process = functools.partial(assert_equals_one_process, start_method="fork")
    check.check()


@needs_silent_gloo
def test_the_check_prints_the_lines_that_are_shown(ending: Ending) -> None:
    """The first words of each line. Versions, addresses and the difference depend on the machine."""
    assert shlex.split(INSTALL.splitlines()[-1]) == ["python", "-m", "joinables", "check"]
    [shown_on_page] = [each.code for each in examples_of("start.md", "text") if "headers travel" in each.code]
    (end,) = ending.ends(forked_check, ranks=1, group=False, limit=150)
    shown = re.sub(r" torch \S+", f" torch {torch.__version__}", shown_on_page).splitlines()
    printed = end.text.removesuffix(end.stderr).splitlines()
    assert [line.split()[1:3] for line in printed] == [line.split()[1:3] for line in shown]
    assert printed[-1] == shown[-1] == LAST_LINE.rstrip()


@pytest.fixture(scope="module")
def failed(ending: Ending, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The outputs of three ranks, after rank 2 has failed."""
    folder = tmp_path_factory.mktemp("failing")
    (folder / "train.py").write_text(FAILING)
    return {rank: end.text for rank, end in enumerate(ending.ends(as_script, str(folder), "train.py", ranks=3))}


@pytest.mark.parametrize("rank", [2, 0])
def test_tracebacks_are_real(failed: dict[int, str], rank: int) -> None:
    """A rank prints each line that is shown, in this order. The README omits frames between them."""
    shown = [line.removeprefix(f"[rank{rank}]: ") for line in FAILED.splitlines() if line.startswith(f"[rank{rank}]: ")]
    output = (line.removeprefix(f"[rank{rank}]: ") for line in failed[rank].splitlines())
    assert len(shown) >= 2
    for line in shown:
        text = line.partition(". ")[0]  # without the advice after the cause
        assert any(each.startswith(text) for each in output), text


@pytest.mark.parametrize("rank", [0, 1])
def test_few_lines_of_this_library_stand_before_the_cause(failed: dict[int, str], rank: int) -> None:
    before, cause, _ = failed[rank].rpartition("join.errors.PeerError: rank 2 failed")
    frames = [line for line in before.splitlines() if re.search(r'File ".*/(join|joinables)/', line)]
    assert cause and len(frames) <= 10  # each has a line of code below it


# -- Getting started --------------------------------------------------------------------------------------------------


def without_numbers(line: str) -> str:
    return re.sub(r"\d+\.\d\d s|: \d+(e[+-]\d+)?$", "", line)


@needs_silent_gloo
def test_getting_started_runs_as_pasted(ending: Ending, tmp_path: Path) -> None:
    """Its script prints the output of the page, except for times and roundings."""
    text = (ROOT / "docs" / "start.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert [language for language, _ in blocks] == ["sh", "python", "sh", "text", "text"]
    installed, script, command, shown, _ = (code for _, code in blocks)
    assert installed == INSTALL
    (tmp_path / "train.py").write_text(script)
    python, *arguments = shlex.split(command)
    assert [python, *arguments[:2]] == ["python", "-m", TORCHRUN]
    # With --standalone, torchrun chooses a free port.
    printed = run_forked(ending, TORCHRUN, "--standalone", *arguments[2:], folder=tmp_path)
    lines, expected = printed.splitlines(), shown.splitlines()
    assert [without_numbers(line) for line in lines] == [without_numbers(line) for line in expected]
    difference = re.search(r"single process: (\S+)", printed)
    assert difference is not None
    assert float(difference[1]) < 1e-6


# -- links ------------------------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_links_lead_to_a_heading() -> None:
    for link in re.findall(r"\]\(([^)]+)\)", TEXT):
        path, _, anchor = link.partition("#")
        if "://" not in link:
            page = ROOT / (path or "README.md")
            assert page.exists(), link
            assert not anchor or anchor in anchors(page.read_text()), link


def test_tests_that_it_names_exist() -> None:
    assert [file for file in re.findall(r"`(tests/[\w/.]+)`", TEXT) if not (ROOT / file).exists()] == []


def test_contributing_has_all_targets_of_make() -> None:
    (targets,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    listed = re.findall(r"^    make ([\w-]+)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(set(targets.split()) - {"help"})

"""The table of patterns: its tests exist, its errors are known, and the page has it. This runs everywhere."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest

from docs.errors import texts
from docs.tables import PATTERNS, pages
from join import JoinError, PeerError
from join.errors import advise
from tests.integrations.table import COLUMNS, FOLDERS, ROWS

HERE = Path(__file__).parent
CONSTRAINTS = HERE.parents[1] / "constraints.txt"
CELLS = {f"{row.title}, {column}": (column, getattr(row, column)) for row in ROWS for column in COLUMNS}
CODES = {code: text for text in texts() for code in text.codes}


@pytest.mark.parametrize("name", [name for name, (_, cell) in CELLS.items() if cell])
def test_a_cell_is_shown(name: str) -> None:
    column, cell = CELLS[name]
    outcome, _, shown = cell.partition(" ")
    if outcome == "yours":
        file, _, section = shown.partition("#")
        titles = re.findall(r"^##+ (.*)$", (PATTERNS.parent / "frameworks" / file).read_text(), re.MULTILINE)
        assert section in {title.lower().replace(" ", "-") for title in titles}
        return
    assert outcome == "exact" or outcome in CODES
    file, _, test = shown.partition("::")
    folders = HERE / FOLDERS.get(column, column), HERE.parent / "join"
    assert any(f"def {test}(" in path.read_text() for each in folders if (path := each / f"{file}.py").exists())


def test_the_page_has_the_table() -> None:
    assert PATTERNS.read_text() == pages()[PATTERNS], "run python -m docs.tables"


def options_of(framework: str) -> set[str]:
    """The names of all options of a framework's classes that its page goes through."""
    if framework == "lightning":
        library = import_module("lightning.pytorch")
        parameters = [signature(each).parameters for each in (library.Trainer, library.strategies.DDPStrategy)]
        return set().union(*parameters) - {"kwargs"}
    if framework == "transformers":
        classes = [import_module(framework).TrainingArguments]
    else:
        names = "DataLoaderConfiguration", "DistributedDataParallelKwargs", "GradientAccumulationPlugin"
        classes = [getattr(import_module("accelerate.utils"), name) for name in names]
    return {field.name for each in classes for field in fields(each) if field.init and not field.name.startswith("_")}


@pytest.mark.parametrize("framework", ["accelerate", "lightning", "transformers"])
def test_each_option_of_a_framework_is_on_its_page(framework: str) -> None:
    library = pytest.importorskip(framework, reason=f"needs the extra {framework}: make test-frameworks")
    newest = re.search(rf"^{framework}==([\d.]+)", CONSTRAINTS.read_text(), re.MULTILINE)
    if newest is None or library.__version__ != newest[1]:
        pytest.skip(f"the page goes through the options of the version in {CONSTRAINTS.name}")
    lines = (PATTERNS.parent / "frameworks" / f"{framework}.md").read_text().splitlines()
    listed = set(re.findall(r"`(\w+)(?:=[^`]*)?`", "".join(line for line in lines if line.startswith("|"))))
    assert options_of(framework) - listed == set()


@pytest.mark.parametrize("framework", ["accelerate", "transformers"])
def test_each_option_that_is_refused_is_on_its_page(framework: str) -> None:
    pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install joinables[accelerate]")
    pytest.importorskip(framework, reason=f"needs the extra {framework}: make test-frameworks")
    refused: dict[str, str] = import_module(f"joinables.integrations.{framework}").REFUSED
    lines = (PATTERNS.parent / "frameworks" / f"{framework}.md").read_text().splitlines()
    for option in refused:
        assert any(f"`{option}`" in line and "[J121]" in line for line in lines), option


def by_code(advice: dict[str, str]) -> dict[str, str]:
    return {code: words for codes, words in advice.items() for code in codes.split()}


UNREACHABLE = {
    "J075": "the loop and its loader belong to the integration, which does not ask for its state",
    "J115": "dummies are last batches, which are not empty",
    "J421": "a module of Lightning's is in DDP",
    "J468": "users have no Join whose weight they could set",
    "J521": "it is Accelerate's",
    "J524": "the loader of the loop is the integration's",
    "J564": "it is of plain blocks",
    "J684": "users call joinables.Mean themselves",
    "J765": "it is of the block that users of Accelerate open",
    "J776": "the loop is the integration's",
}
"""Errors whose advice is a loop, and that users of Lightning and of Transformers do not meet."""


@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_no_advice_is_a_loop_that_users_do_not_write(framework: str) -> None:
    """Each text that says what to pass to a loop is reworded for frameworks that have the loop, or is not met there."""
    package = "lightning.strategy" if framework == "lightning" else framework
    pytest.importorskip(framework, reason=f"needs the extra {framework}: make test-frameworks")
    advice = by_code(pytest.importorskip(f"joinables.integrations.{package}").ADVICE)
    said = {code for code, text in CODES.items() if "join.iterate(" in text.words and "trainer" not in text.path.parts}
    assert said - set(advice) - set(UNREACHABLE) == set()
    for code, words in advice.items():
        error, peer = (
            JoinError(CODES[code].words),
            PeerError(f"rank 1 failed: ValueError: {CODES[code].words}. Restart"),
        )
        for each in (error, peer):
            advise(each, advice)
            assert "join.iterate(" not in str(each) and "join.scale(" not in str(each)
            assert (each.code, each.advice) == (code, words)
        assert str(peer).endswith(f"{words} [{code}]. Restart")


def test_every_advice_is_for_an_error_that_exists() -> None:
    pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install joinables[accelerate]")
    from joinables.integrations.accelerate import ADVICE

    assert by_code(ADVICE).keys() <= CODES.keys()

"""Each block of code in the README, in the documentation and in docstrings runs as it stands, or says why not.

It runs on two uneven ranks, with a loader of a map-style data set and with a stream. Parameters, optimizer state, the
samples that were read, and what the block logs are those of the same block in a single process.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace

import pytest
import torch

import join
import joinables
import joinables.testing
import joinables.trainer
from tests.docs import names
from tests.docs.names import check
from tests.examples import DOCS, after, examples_in_docstrings, examples_of
from tests.harness import Pool

PAGES = ["../README.md", *sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))]
ELSEWHERE = "errors.md", "frameworks/"
EXAMPLES = {
    f"{page}-{kind}{number}": replace(each, code=after(each.code) if kind else each.code)
    for page in PAGES
    if not page.startswith(ELSEWHERE)
    for kind, language in (("", "python"), ("diff ", "diff"))
    for number, each in enumerate(examples_of(page, language))
}
EXAMPLES |= {each.name: each for each in examples_in_docstrings(join, joinables, joinables.testing, joinables.trainer)}
EXAMPLES["Joinable"] = replace(EXAMPLES["Joinable"], code=EXAMPLES["JoinHook"].code + EXAMPLES["Joinable"].code)
ERRORS = {each.name: each for each in examples_of("errors.md")}
APART = {
    "Join.pending": "tests/dropin/test_migrate.py::test_loop",
    "assert_equals_one_process": "tests/docs/test_pages.py::test_functions_for_tests",
    "run_ranks": "tests/docs/test_pages.py::test_functions_for_tests",
    "J022": "tests/docs/test_examples.py::test_no_process_group",
    "J064": "not run, since it needs a system without memory",
}
"""Examples where no mark can stand: in docstrings, and on the page that is generated."""
APART |= {name: each.apart for name, each in EXAMPLES.items() if each.apart}


def test_there_is_no_other_code() -> None:
    """Blocks have languages that are known here, and none is indented, in a list for instance."""
    fences = [
        fence for page in PAGES for fence in re.findall(r"^( *)```+(\w*)", (DOCS / page).read_text(), re.MULTILINE)
    ]
    assert set(fences) <= {("", language) for language in ("", "python", "diff", "sh", "bash", "text")}


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in APART])
def test_example(pool: Pool, name: str) -> None:
    check(pool, EXAMPLES[name].code)


@pytest.mark.parametrize("name", APART)
def test_an_example_that_is_not_run_here(name: str) -> None:
    """It names a test that exists, or a reason."""
    file, found, test = APART[name].partition("::")
    assert f"def {test}(" in (DOCS.parent / file).read_text() if found else file.startswith("not run, since ")


# -- errors.md --------------------------------------------------------------------------------------------------------


class Names(names.Names):
    def loss_of(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss_fn(self.model(x), y)


def outcome(rank: int, code: str) -> str:
    """Run a part of an example. If it makes a ``Join``, enter it. Return the text of the error."""
    given = Names(f"made = {code}" if code.startswith("Join(") else code, "map")
    try:
        given.run()
        with given.names.get("made", contextlib.nullcontext()):
            pass
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", [name for name in ERRORS if name not in APART])
def test_error(pool: Pool, name: str) -> None:
    """Its first part raises this error on all ranks, its second part none."""
    code = ERRORS[name].code.replace("timeout=60", "timeout=1").replace("8", "4")
    parts = code.split("\n\n") if "\n\n" in code else code.splitlines()
    texts = [pool.run(outcome, part, ranks=2) for part in parts]
    assert all(f"[{name}]" in text for text in texts[0]), texts[0]
    assert texts[1:] == [["", ""]]


def test_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    statement, _ = ERRORS["J022"].code.split("\n\n")
    with pytest.raises(ValueError, match="J022"):
        exec(statement, {"Join": join.Join})

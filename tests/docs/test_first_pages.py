"""The first pages of the documentation: their loops agree, and their picture is up to date."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from docs import choosing, two_ranks
from tests.examples import DOCS, examples_of


def test_the_page_and_the_readme_change_the_loop_alike() -> None:
    [ours], [theirs] = (examples_of(page, "diff") for page in ("hang.md", "../README.md"))
    assert ours.code == theirs.code


def test_each_symptom_has_a_section() -> None:
    text = (DOCS / "hang.md").read_text()
    headings = [re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in re.findall(r"^## (.*)$", text, re.M)]
    links = re.findall(r"\]\(#([\w-]+)\) \|$", text, re.MULTILINE)
    assert set(headings) <= set(links) <= {*headings, "when-ranks-cannot-connect"}


def test_the_picture_is_up_to_date_and_fits_a_telephone() -> None:
    drawn = choosing.PICTURE.read_text()
    assert drawn == choosing.picture(), "run python -m docs.choosing"
    assert 'width="400"' in drawn
    assert "pictures/choosing.svg" in (DOCS / "choosing.md").read_text()


def test_the_two_timelines_are_those_of_the_script() -> None:
    assert two_ranks.PICTURE.read_text() == two_ranks.picture(), "run python -m docs.two_ranks"


@pytest.mark.parametrize("line", [line for question in choosing.QUESTIONS for line in question])
def test_each_question_fits_its_box(line: str) -> None:
    assert len(line) * 7 <= choosing.COLUMN  # pixels of a letter, of the broadest fonts


def test_each_page_is_in_the_navigation_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No page is under "More". Mkdocs need not be installed."""
    for name in ("mkdocs", "mkdocs.structure", "mkdocs.structure.files"):
        module: Any = ModuleType(name)
        module.File = module.Files = object
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "docs.site", raising=False)
    site = importlib.import_module("docs.site")
    monkeypatch.delitem(sys.modules, "docs.site")
    pages = {**site.own_pages(), **site.generated_pages()}
    entries = site.navigation(pages)
    titles = [title for entry in entries for title in entry]
    assert titles[:4] == ["Home", "My job hangs or fails", "Getting started", "Convert a real script"]
    assert "More" not in titles
    assert sorted(listed(entries)) == sorted(pages)
    assert not {f"{page}.md" for page in site.HEIRS} & pages.keys()
    assert {heir.partition(".html")[0] for heir in site.HEIRS.values()} <= {path.removesuffix(".md") for path in pages}


def listed(entries: list[Any]) -> list[str]:
    """Return the pages of a navigation."""
    values = [value for entry in entries for value in entry.values()]
    return [page for value in values for page in (listed(value) if isinstance(value, list) else [value])]


def test_the_architecture_names_each_file() -> None:
    """Those of the protocol and of the adapters; the trainer, the integrations and private names are folders there."""
    root = DOCS.parent
    files = [*(root / "join").rglob("*.py"), *(root / "joinables").glob("*.py"), *(root / "joinables/ddp").glob("*.py")]
    tree = re.findall(r"^    .*$", (DOCS / "architecture.md").read_text(), re.MULTILINE)
    listed = set(re.findall(r"\b(\w+\.py)\b", "\n".join(tree)))
    assert {path.name for path in files} - {"__init__.py"} == listed


def test_the_pages_are_few_and_short() -> None:
    """A reader who needs one subject reads one page, and half of the words that there once were."""
    pages = {path.relative_to(DOCS): len(path.read_text().split()) for path in DOCS.rglob("*.md")}
    del pages[Path("errors.md")]
    assert len(pages) <= 24
    assert sum(pages.values()) <= 30_000, pages

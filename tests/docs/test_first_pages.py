"""The first pages of the documentation: their code runs as pasted, and their picture is up to date."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import join
from docs import choosing
from tests.models import batch, build, mlp_in_one_process
from tests.pool import Pool

DOCS = Path(join.__file__).parent.parent / "docs"
COUNTS = 0, 3, 1
LOOPS = ("hang.md", 0), ("choosing.md", 0), ("choosing.md", 1)


def blocks(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


def follow(rank: int, code: str) -> list[torch.Tensor]:
    """Run a block of code on uneven ranks; return the parameters of the model."""
    model = DistributedDataParallel(build("mlp"))
    names: dict[str, Any] = {"torch": torch, "dist": dist, "Join": join.Join, "model": model}
    names |= {"optimizer": torch.optim.Adam(model.parameters()), "loss_fn": torch.nn.functional.mse_loss}
    names["loader"] = [batch(rank, 0, step) for step in range(COUNTS[rank])]
    exec(code, names)
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(("page", "at"), LOOPS)
def test_loops_give_the_result_of_one_process(pool: Pool, page: str, at: int) -> None:
    for found in pool.run(follow, blocks(page)[at], ranks=len(COUNTS)):
        torch.testing.assert_close(found, mlp_in_one_process(COUNTS), atol=1e-6, rtol=0)


def test_no_loop_is_forgotten() -> None:
    """Besides the loops there is only the end of a script, which would end the group of the tests."""
    pages = {page for page, _ in LOOPS}
    others = [code for page in pages for at, code in enumerate(blocks(page)) if (page, at) not in LOOPS]
    assert others == ["dist.barrier()\ndist.destroy_process_group()\n"]


def test_the_page_and_the_readme_change_the_loop_alike() -> None:
    readme = (DOCS.parent / "README.md").read_text()
    assert blocks("hang.md", "diff")[0] in readme


def test_each_symptom_has_a_section() -> None:
    text = (DOCS / "hang.md").read_text()
    headings = [re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in re.findall(r"^## (.*)$", text, re.M)]
    links = re.findall(r"\]\(#([\w-]+)\) \|$", text, re.MULTILINE)
    assert list(dict.fromkeys(links)) == headings


def test_the_picture_is_up_to_date_and_fits_a_telephone() -> None:
    drawn = choosing.PICTURE.read_text()
    assert drawn == choosing.picture(), "run python -m docs.choosing"
    assert 'width="400"' in drawn
    assert "pictures/choosing.svg" in (DOCS / "choosing.md").read_text()


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
    assert titles[:4] == ["Home", "My job hangs", "Getting started", "Convert a real script"]
    assert titles[4:6] == ["How it works", "Choosing plain or iterate"]
    assert "More" not in titles
    assert sorted(listed(entries)) == sorted(pages)


def listed(entries: list[Any]) -> list[str]:
    """Return the pages of a navigation."""
    values = [value for entry in entries for value in entry.values()]
    return [page for value in values for page in (listed(value) if isinstance(value, list) else [value])]

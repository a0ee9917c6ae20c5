"""The documentation is built without a warning; its pages are opened in a headless browser."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import threading
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import pytest

import join

ROOT = Path(join.__file__).parent.parent
BROWSER = ROOT / ".venv-docs"
LIMIT = 400  # seconds
PUBLIC = (
    *("join", "join.collectives", "joinables", "joinables.trainer"),
    *(f"joinables.integrations.{name}" for name in ("accelerate", "lightning", "transformers")),
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the pages and return their folder."""
    pytest.importorskip("mkdocstrings", reason="needs the extra docs: make test-docs")
    folder = tmp_path_factory.mktemp("site")
    command = "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return folder


class Page(HTMLParser):
    """The links of a page, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors = {"", "__top"}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value is not None:
                self.links.append(value)
            elif name in ("id", "name"):
                self.anchors.add(value or "")


def pages_of(site: Path) -> list[str]:
    """All pages but those that only lead to their heirs."""
    found = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    moved = {path for path in found if "<title>Moved</title>" in (site / path).read_text()}
    return sorted(found - moved - {"404.html"})


def test_no_link_is_dead(site: Path) -> None:
    pages = {path: Page((site / path).read_text()) for path in pages_of(site)}
    assert len(pages) > 20
    dead: list[str] = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(urljoin(f"https://site/{path}", link))
            if parts.netloc != "site" or parts.scheme != "https":
                continue
            target = unquote(parts.path).lstrip("/") or "index.html"
            known = pages[target].anchors if target in pages else {""}
            if not (site / target).exists() or unquote(parts.fragment) not in known:
                dead.append(f"{path}: {link}")
    assert not dead


def test_an_address_of_an_earlier_version_leads_to_its_heir(site: Path) -> None:
    moved = sorted({path.relative_to(site).as_posix() for path in site.rglob("*.html")} - {"404.html", *pages_of(site)})
    assert len(moved) > 10
    for path in moved:
        (link,) = Page((site / path).read_text()).links
        target = urlsplit(urljoin(f"https://site/{path}", link))
        assert target.fragment in Page((site / target.path.lstrip("/")).read_text()).anchors, path


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for path in pages_of(site):
        found = re.findall(
            r"<(?:script|img|iframe|link)[^>]+(?:src|href)=\"?(https?:[^\" >]+)", (site / path).read_text()
        )
        assert not found, path


def test_each_script_has_a_page_with_its_code(site: Path) -> None:
    for script in sorted(ROOT.glob("tutorials/[0-9]*.py")):
        text = (site / "howto" / f"{script.stem}.html").read_text()
        assert "What it prints" in text, f"make outputs: {script.name}"


@pytest.mark.parametrize("package", PUBLIC)
def test_the_reference_has_all_public_names_and_no_other(package: str) -> None:
    path = ROOT / package.replace(".", "/")
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    told = re.search(r"^__all__ = \[(.*?)\]", source, re.DOTALL | re.MULTILINE)
    assert told
    names = set(re.findall(r"\"(\w+)\"", told[1])) - (set(join.__all__) if package == "joinables" else set[str]())
    pages = "\n".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    listed = re.findall(rf"^::: {re.escape(package)}\.(\w+)$", pages, re.MULTILINE)
    assert sorted(listed) == sorted(names)


def test_the_search_index_has_words_of_all_pages(site: Path) -> None:
    found = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    assert {each["location"].partition("#")[0] for each in found} >= set(pages_of(site)) - {"index.html"}
    assert sum("weight" in each["text"] for each in found) > 5


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def seen(site: Path) -> dict[str, Any]:
    """Open all pages in a browser, and return its findings."""
    if not (BROWSER / ".installed").exists() and "CHROMIUM" not in os.environ:
        pytest.skip("needs a headless browser, which `make test-docs` installs")
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    (BROWSER / "tmp").mkdir(exist_ok=True)
    try:
        command = "node", str(Path(__file__).parent / "browse.mjs"), str(BROWSER)
        done = subprocess.run(
            [*command, f"http://127.0.0.1:{server.server_port}", "index.html", *pages_of(site)],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
            env={**os.environ, "SITE": str(site), "TMPDIR": str(BROWSER / "tmp")},  # where the browser is unpacked
        )
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout(LIMIT + 100)
def test_each_page_renders(seen: dict[str, Any], site: Path) -> None:
    assert set(seen["pages"]) == set(pages_of(site))
    for path, looks in seen["pages"].items():
        for look in looks.values():
            assert not look["errors"], path
            assert not look["images"], path
            assert look["heading"], path
            assert len(look["text"]) > 200, path
            # Markup that was not rendered.
            assert not re.search(r":(class|func|meth|mod|attr):`|^:::|^\|[ :-]+\|", look["text"], re.MULTILINE), path


def test_each_page_is_readable_on_a_telephone(seen: dict[str, Any]) -> None:
    """At 390 pixels, no page is wider than the window, and no code to paste is cut."""
    narrow = {path: (looks["dark"]["width"], looks["dark"]["cut"]) for path, looks in seen["pages"].items()}
    assert {path: found for path, found in narrow.items() if found[0] > 390 or found[1]} == {}


def test_each_page_is_dark_where_that_is_wanted(seen: dict[str, Any]) -> None:
    for path, looks in seen["pages"].items():
        assert looks["light"]["background"] > 200 > 100 > looks["light"]["ink"], path
        assert looks["dark"]["background"] < 80 < 130 < looks["dark"]["ink"], path


@pytest.mark.parametrize("opened", ["served", "as files"])
def test_search_finds_a_word(seen: dict[str, Any], opened: str) -> None:
    assert not seen["errors"][opened]
    assert any("weight" in text for text in seen["search"][opened])


def test_an_old_address_leads_to_its_section(seen: dict[str, Any]) -> None:
    """With its anchor, if the heir has it."""
    assert seen["moved"] == ["hang.html#when-a-rank-fails", "hang.html#timeout"]

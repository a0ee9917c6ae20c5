"""Navigation of the documentation, and pages that are made from files outside ``docs``: a hook of mkdocs.

The first page is the README. Each tutorial and each recipe becomes a page with its docstring, its code and the output
of a run. They need no entry in :data:`NAVIGATION`. A page of ``docs`` without an entry is listed under "More".
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files  # pyright: ignore[reportMissingImports]

from docs.outputs import DOCS, OUTPUTS, ROOT, output_of, scripts

BESIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
"""Files outside ``docs``, and the names of their pages."""

NAVIGATION: dict[str, Any] = {
    "Home": "index.md",
    "My job hangs or fails": "hang.md",
    "Getting started": "start.md",
    "Convert a real script": "convert.md",
    "Plain block or join.iterate": "choosing.md",
    "Guides": {
        "The plain block": "block.md",
        "Loops with collectives: join.iterate": "iterate.md",
        "Weights and accumulation": "weights.md",
        "Metrics": "metrics.md",
        "Sharded models": "sharded.md",
        "Saving and resuming": "elastic.md",
        "The trainer": "trainer.md",
    },
    "Frameworks": {
        "Overview": "frameworks.md",
        "Lightning and Fabric": "frameworks/lightning.md",
        "Accelerate": "frameworks/accelerate.md",
        "Transformers": "frameworks/transformers.md",
        "Ray and others": "frameworks/other.md",
    },
    "Engines: DeepSpeed, Horovod and others": "engines.md",
    "Recipes": {},  # all scripts in recipes
    "Tutorials": {"The demo": "howto/demo.md"},  # and all scripts and notebooks in tutorials
    "Errors": "errors.md",
    "Support matrix and versions": "support.md",
    "Performance": "performance.md",
    "Reference": {"Join": "api/join.md", "Joinables, testing, trainer": "api/joinables.md"},
    "Extending": {"Custom joinables": "joinable.md", "For framework authors": "authors.md"},
    "Project": {
        "Architecture": "architecture.md",
        "Contributing": "contributing.md",
        "Security": "security.md",
        "Changelog": "changelog.md",
    },
}
"""Titles and pages, in order. The navigation skips pages that do not exist."""

HEIRS = {
    "api/collectives": "api/join.html#collectives",
    "api/integrations": "api/joinables.html#frameworks",
    "api/testing": "api/joinables.html#testing",
    "api/trainer": "api/joinables.html#the-trainer",
    "backends": "engines.html#horovod",
    "check": "start.html#checking-a-machine",
    "concepts": "choosing.html#what-happens",
    "failures": "hang.html#when-a-rank-fails",
    "frameworks/ray": "frameworks/other.html#ray-train",
    "glossary": "choosing.html#words",
    "howto/notebook": "howto/11_notebook.html",
    "interrupted": "hang.html#on-entering-and-leaving",
    "limits": "support.html",
    "migrate": "convert.html#from-another-join",
    "profiling": "hang.html#finding-the-slow-rank",
    "versions": "support.html#versions",
}
"""For each page of an earlier version, the place that has its subject now."""

HEIR = """\
<!doctype html>
<meta charset="utf-8">
<title>Moved</title>
<noscript><meta http-equiv="refresh" content="0; url={heir}"></noscript>
<p>This page is a part of <a href="{heir}">another one</a> now.</p>
<script>
const [page, anchor] = "{heir}#".split("#"), own = location.hash.slice(1), known = {anchors};
location.replace(`${{page}}#${{known.includes(own) ? own : anchor}}`);
</script>
"""


def fenced(language: str, text: str) -> str:
    """Return a block of code, fenced by more backticks than the text contains."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall(r"^`{3,}", text, re.MULTILINE))])
    return f"{fence}{language}\n{text.strip()}\n{fence}\n"


def page_of_script(script: Path) -> str:
    """Return the page of a tutorial or a recipe: an introduction, the code, and the output of a run.

    The introduction is the docstring.
    """
    text = script.read_text()
    docstring = ast.get_docstring(ast.parse(text)) or script.stem
    code = text.partition('"""')[2].partition('"""')[2]
    output = output_of(script)
    first, _, rest = docstring.partition("\n")
    name = script.relative_to(ROOT).as_posix()
    parts = [f"# {first.rstrip('.')}\n{rest}\n", f"## The script\n\n`{name}`:\n\n{fenced('python', code)}"]
    if output.exists():
        parts.append(f"## What it prints\n\n{fenced('text', output.read_text())}")
    return "\n".join(parts)


def page_of_notebook(notebook: Path) -> str:
    """Return the cells of a notebook and their output."""
    parts: list[str] = []
    for cell in json.loads(notebook.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else fenced("python", source))
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(f"![](data:image/png;base64,{''.join(data['image/png']).strip()})")
            elif "text" in output or "text/plain" in data:
                parts.append(fenced("text", "".join(output.get("text") or data["text/plain"])))
    return "\n\n".join(parts)


def generated_pages() -> dict[str, str]:
    """Return the pages that are made from other files, by path."""
    found = {page: (ROOT / name).read_text().replace("](docs/", "](") for name, page in BESIDE.items()}
    demo = (OUTPUTS / "demo.txt").read_text()
    found["howto/demo.md"] = (
        "# The demo\n\n`make demo` trains on handwritten digits on four ranks with very different numbers of batches,"
        " once with this library's `Join` and once with PyTorch's. It compares both with a single process, and prints:"
        f"\n\n{fenced('text', demo)}\nIt draws `demo-out/timeline.png`:\n\n![The demo's picture](../demo.png)\n\n"
        "The tutorials are scripts. After `make demo`, run one with `.venv/bin/python tutorials/01_uneven_ddp.py`."
        " Without `make demo`, first install the data that some of them use, in the clone: `pip install '.[demo]'`.\n"
    )
    for script in scripts():
        found[f"howto/{script.stem}.md"] = page_of_script(script)
    for notebook in sorted(ROOT.glob("tutorials/*.ipynb")):
        found[f"howto/{notebook.stem}.md"] = page_of_notebook(notebook)
    return found


def linked(text: str, path: str) -> str:
    """Return the text with links to pages instead of links to tutorials, recipes and other files outside ``docs``."""
    up = "../" * path.count("/")
    text = re.sub(r"\]\((?:\.\./)*(?:tutorials|recipes)/(\w+)\.(?:py|md|ipynb)\)", rf"]({up}howto/\1.md)", text)
    text = re.sub(r"\]\((?:\.\./)*(?:tutorials|recipes)/?\)", f"]({up}howto/demo.md)", text)
    for name, page in BESIDE.items():
        text = re.sub(rf"\]\((?:\.\./)*{re.escape(name)}\b", f"]({up}{page}", text)
    return text


def title_of(text: str, path: str) -> str:
    """Return the first heading of a page; without one, the name of its file."""
    found = re.search(r"^# (.+)$", text, re.MULTILINE)
    return re.sub(r"[`*]", "", found.group(1)) if found else Path(path).stem


def own_pages() -> dict[str, str]:
    """Return the pages in ``docs``, by path."""
    return {path.relative_to(DOCS).as_posix(): path.read_text() for path in sorted(DOCS.rglob("*.md"))}


def navigation(pages: dict[str, str]) -> list[Any]:
    """Return the navigation in the form of mkdocs, with the pages that exist."""
    used = set(_pages_of(NAVIGATION))
    tree = {title: dict(entry) if isinstance(entry, dict) else entry for title, entry in NAVIGATION.items()}
    recipes = {f"howto/{script.stem}.md" for script in scripts() if script.parent.name == "recipes"}
    for path, text in pages.items():
        if path not in used:
            section = "More" if not path.startswith("howto/") else "Recipes" if path in recipes else "Tutorials"
            tree.setdefault(section, {})[title_of(text, path)] = path
    return _entries(tree, pages)


def _pages_of(tree: dict[str, Any]) -> Iterator[str]:
    for entry in tree.values():
        yield from _pages_of(entry) if isinstance(entry, dict) else (entry,)


def _entries(tree: dict[str, Any], pages: dict[str, str]) -> list[Any]:
    found: list[Any] = []
    for title, entry in tree.items():
        inner = _entries(entry, pages) if isinstance(entry, dict) else entry if entry in pages else None
        if inner:
            found.append({title: inner})
    return found


def on_config(config: Any) -> Any:
    """Set the navigation. Mkdocs calls this first."""
    config.nav = navigation({**own_pages(), **generated_pages()})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages to the files of ``docs``. Mkdocs calls this."""
    for path, text in generated_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the Markdown of a page with its links. Mkdocs calls this for each page."""
    return linked(markdown, page.file.src_uri)


def on_post_build(config: Any) -> None:
    """Write a page at each address of an earlier version, which leads to its heir. Mkdocs calls this last."""
    for page, heir in HEIRS.items():
        known = re.findall(r' id="([\w-]+)"', Path(config.site_dir, heir.partition("#")[0]).read_text())
        path = Path(config.site_dir, f"{page}.html")
        path.write_text(HEIR.format(heir="../" * page.count("/") + heir, anchors=json.dumps(known)))

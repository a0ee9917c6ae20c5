"""Pages of the documentation that are made from files elsewhere, and its navigation: a hook of mkdocs.

The first page is the README. Each tutorial and each recipe is a page: its docstring, its code, and what a run of it has
printed. So none of them is listed here, nor is a page of ``docs`` that :data:`NAVIGATION` does not have.
"""

from __future__ import annotations

import ast
import json
import re
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
"""Pages that are not in ``docs``, and their names there."""

NAVIGATION: dict[str, Any] = {
    "Home": "index.md",
    "My job hangs": "hang.md",
    "Getting started": "start.md",
    "How it works": "concepts.md",
    "Choosing plain or iterate": "choosing.md",
    "Guides": {
        "The plain block": "block.md",
        "Loops with collectives: join.iterate": "iterate.md",
        "Weights and accumulation": "weights.md",
        "Metrics": "metrics.md",
        "Sharded models": "sharded.md",
        "Engines": "engines.md",
        "Saving and resuming": "elastic.md",
        "The trainer": "trainer.md",
    },
    "Frameworks": {
        "Overview": "frameworks.md",
        "Lightning and Fabric": "frameworks/lightning.md",
        "Accelerate": "frameworks/accelerate.md",
        "Transformers": "frameworks/transformers.md",
    },
    "Tutorials": {"The demo": "howto/demo.md"},  # and all scripts and notebooks in tutorials
    "Recipes": {},  # all scripts in recipes
    "When it goes wrong": {
        "Failures": "failures.md",
        "Errors": "errors.md",
        "Profiling": "profiling.md",
        "Checking a machine": "check.md",
        "Limits by subject": "limits.md",
    },
    "Performance": "performance.md",
    "Support matrix": "support.md",
    "Reference": {
        "Join": "api/join.md",
        "Joinables": "api/joinables.md",
        "The trainer": "api/trainer.md",
        "Frameworks": "api/integrations.md",
        "Collectives": "api/collectives.md",
    },
    "Extending": {"Custom joinables": "joinable.md", "For framework authors": "authors.md"},
    "Project": {
        "Glossary": "glossary.md",
        "A tour of the code": "architecture.md",
        "Migrating": "migrate.md",
        "Versions": "versions.md",
        "Contributing": "contributing.md",
        "Security": "security.md",
        "Changelog": "changelog.md",
    },
}
"""Titles and pages. The navigation skips pages that do not exist."""


def fenced(language: str, text: str) -> str:
    """A block of code."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall(r"^`{3,}", text, re.MULTILINE))])
    return f"{fence}{language}\n{text.strip()}\n{fence}\n"


def page_of_script(script: Path) -> str:
    """A tutorial or a recipe: why, how, and what comes out; ``docs/recipes`` may say more of a recipe."""
    text = script.read_text()
    docstring = ast.get_docstring(ast.parse(text)) or script.stem
    code = text.partition('"""')[2].partition('"""')[2]
    told = output_of(script)
    first, _, rest = docstring.partition("\n")
    own = DOCS / script.parent.name / f"{script.stem}.md"
    head = own.read_text() if own.exists() else f"# {first.rstrip('.')}\n{rest}\n"
    name = script.relative_to(ROOT).as_posix()
    parts = [head, f"## The script\n\n`{name}`:\n\n{fenced('python', code)}"]
    if told.exists():
        parts.append(f"## What it prints\n\n{fenced('text', told.read_text())}")
    return "\n".join(parts)


def page_of_notebook(notebook: Path) -> str:
    """A notebook's cells, and what they have printed."""
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
    """The pages that are made here, by path."""
    found = {page: (ROOT / name).read_text().replace("](docs/", "](") for name, page in BESIDE.items()}
    demo = (OUTPUTS / "demo.txt").read_text()
    found["howto/demo.md"] = (
        "# The demo\n\n`make demo` trains on handwritten digits on four ranks of very different lengths, under this"
        " library's `Join` and under torch's, and compares both with one process. It prints\n\n"
        f"{fenced('text', demo)}\nand draws, into `demo-out/timeline.png`,\n\n![The demo's picture](../demo.png)\n\n"
        "The next pages are scripts: `.venv/bin/python tutorials/01_uneven_ddp.py` after `make demo`; elsewhere"
        " `pip install 'joinables[demo]'` first, which brings the data that some train on.\n"
    )
    for script in scripts():
        found[f"howto/{script.stem}.md"] = page_of_script(script)
    for notebook in sorted(ROOT.glob("tutorials/*.ipynb")):
        found[f"howto/{notebook.stem}.md"] = page_of_notebook(notebook)
    return found


def linked(text: str, path: str) -> str:
    """With links to files beside ``docs``, to tutorials and to recipes made links to their pages."""
    up = "../" * path.count("/")
    text = re.sub(r"\]\((?:\.\./)*(?:tutorials|recipes)/(\w+)\.(?:py|md|ipynb)\)", rf"]({up}howto/\1.md)", text)
    text = re.sub(r"\]\((?:\.\./)*(?:tutorials|recipes)/?\)", f"]({up}howto/demo.md)", text)
    for name, page in BESIDE.items():
        text = re.sub(rf"\]\((?:\.\./)*{re.escape(name)}\b", f"]({up}{page}", text)
    return text


def title_of(text: str, path: str) -> str:
    found = re.search(r"^# (.+)$", text, re.MULTILINE)
    return re.sub(r"[`*]", "", found.group(1)) if found else Path(path).stem


def own_pages() -> dict[str, str]:
    """The pages that lie in ``docs``; those of recipes become parts of others."""
    return {
        path.relative_to(DOCS).as_posix(): path.read_text()
        for path in sorted(DOCS.rglob("*.md"))
        if path.parent.name not in ("recipes", "outputs")
    }


def navigation(pages: dict[str, str]) -> list[Any]:
    """As mkdocs wants it: what is there."""
    used: set[str] = set()

    def entries(tree: dict[str, Any]) -> list[Any]:
        found: list[Any] = []
        for title, what in tree.items():
            inner = entries(what) if isinstance(what, dict) else what if what in pages else None
            used.add(what if isinstance(what, str) else "")
            if inner:
                found.append({title: inner})
        return found

    tree = {title: dict(entry) if isinstance(entry, dict) else entry for title, entry in NAVIGATION.items()}
    recipes = {f"howto/{script.stem}.md" for script in scripts() if script.parent.name == "recipes"}
    for path, text in pages.items():
        if path.startswith("howto/") and path != "howto/demo.md":
            tree["Recipes" if path in recipes else "Tutorials"][title_of(text, path)] = path
    found = entries(tree)
    if more := [{title_of(text, path): path} for path, text in pages.items() if path not in used]:
        found.append({"More": more})
    return found


def on_config(config: Any) -> Any:
    """Called by mkdocs first."""
    config.nav = navigation({**own_pages(), **generated_pages()})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Called by mkdocs with the files of ``docs``."""
    for file in [file for file in files if file.src_uri.startswith("recipes/")]:
        files.remove(file)
    for path, text in generated_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs with each page."""
    return linked(markdown, page.file.src_uri)

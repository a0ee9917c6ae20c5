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
    "My job hangs": "hang.md",
    "Getting started": "start.md",
    "Convert a real script": "convert.md",
    "How it works": "concepts.md",
    "Choosing plain or iterate": "choosing.md",
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
        "Ray": "frameworks/ray.md",
        "Any other": "frameworks/other.md",
    },
    "Engines": {
        "Overview": "engines.md",
        "DeepSpeed": "howto/deepspeed_zero.md",
        "FSDP1": "howto/fsdp1.md",
        "FSDP2: generate()": "howto/generate_fsdp2.md",
        "FSDP2: evaluation": "howto/evaluate_fsdp2.md",
        "Pipeline parallelism": "howto/pipeline_parallel.md",
        "Expert parallelism": "howto/expert_parallel.md",
        "HSDP and tensor parallelism": "howto/device_meshes.md",
        "Optimizers that shard themselves": "howto/sharded_optimizer.md",
        "Engines that count micro-batches": "howto/counting_engine.md",
    },
    "Horovod and PyTorch/XLA": "backends.md",
    "Recipes": {},  # the other recipes
    "Tutorials": {"The demo": "howto/demo.md"},  # and all scripts and notebooks in tutorials
    "When it goes wrong": {
        "Failures": "failures.md",
        "Interrupted everywhere": "interrupted.md",
        "Errors": "errors.md",
        "Profiling": "profiling.md",
        "Checking a machine": "check.md",
        "Index of limits": "limits.md",
    },
    "Performance": "performance.md",
    "Support matrix": "support.md",
    "Reference": {
        "Join": "api/join.md",
        "Joinables": "api/joinables.md",
        "Testing": "api/testing.md",
        "The trainer": "api/trainer.md",
        "Frameworks": "api/integrations.md",
        "Collectives": "api/collectives.md",
    },
    "Extending": {"Custom joinables": "joinable.md", "For framework authors": "authors.md"},
    "Project": {
        "Glossary": "glossary.md",
        "Architecture": "architecture.md",
        "Migrating": "migrate.md",
        "Versions": "versions.md",
        "Contributing": "contributing.md",
        "Security": "security.md",
        "Changelog": "changelog.md",
    },
}
"""Titles and pages, in order. The navigation skips pages that do not exist."""


def fenced(language: str, text: str) -> str:
    """Return a block of code, fenced by more backticks than the text contains."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall(r"^`{3,}", text, re.MULTILINE))])
    return f"{fence}{language}\n{text.strip()}\n{fence}\n"


def page_of_script(script: Path) -> str:
    """Return the page of a tutorial or a recipe: an introduction, the code, and the output of a run.

    The introduction is the page in ``docs/recipes``, if there is one, and otherwise the docstring.
    """
    text = script.read_text()
    docstring = ast.get_docstring(ast.parse(text)) or script.stem
    code = text.partition('"""')[2].partition('"""')[2]
    output = output_of(script)
    first, _, rest = docstring.partition("\n")
    own = DOCS / script.parent.name / f"{script.stem}.md"
    head = own.read_text() if own.exists() else f"# {first.rstrip('.')}\n{rest}\n"
    name = script.relative_to(ROOT).as_posix()
    parts = [head, f"## The script\n\n`{name}`:\n\n{fenced('python', code)}"]
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
        " Without `make demo`, first install the data that some of them use: `pip install 'joinables[demo]'`.\n"
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
    """Return the pages in ``docs``, by path, without introductions of recipes."""
    return {
        path.relative_to(DOCS).as_posix(): path.read_text()
        for path in sorted(DOCS.rglob("*.md"))
        if path.parent.name not in ("recipes", "outputs")
    }


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
    for file in [file for file in files if file.src_uri.startswith("recipes/")]:
        files.remove(file)
    for path, text in generated_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the Markdown of a page with its links. Mkdocs calls this for each page."""
    return linked(markdown, page.file.src_uri)

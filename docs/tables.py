"""Writer of the tables of tests on pages: ``python -m docs.tables``.

Each cell of the table of engines is a test (``tests/engines/table.py``). Each cell of the table of patterns names a
test, or a section of a page (``tests/integrations/table.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tests.engines import table as engines
from tests.integrations import table as patterns

DOCS = Path(__file__).parent
ENGINES, PATTERNS = DOCS / "engines.md", DOCS / "frameworks.md"
PLACE = re.compile(r"(?<=-->\n\n<!-- table -->\n).*(?=<!-- end -->)", re.DOTALL)


def engine(row: engines.Row) -> list[str]:
    """Return the cells of an engine; the first one links to the page, tutorial or recipe that shows it."""
    page = f"{row.page}.md"
    if not (DOCS / page).exists():
        ((script),) = (each for each in ("tutorials", "recipes") if (DOCS.parent / each / f"{row.page}.py").exists())
        page = f"../{script}/{row.page}.py"
    return [f"[{row.title}]({page})", *(outcome(getattr(row, column)) for column in engines.COLUMNS)]


def pattern(row: patterns.Row) -> list[str]:
    """Return the cells of a pattern."""
    return [row.title, *(outcome(getattr(row, column)) for column in patterns.COLUMNS)]


def outcome(text: str) -> str:
    """Return a cell: a word, or a link to an error or to the section that shows the user's part."""
    first, _, section = text.partition(" ")
    if first.startswith("J"):
        return f"[{first}](errors.md#{first.lower()})"
    return f"[yours](frameworks/{section})" if first == "yours" else first


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def pages() -> dict[Path, str]:
    """Return the pages, with the tables of today."""
    columns = "".join(f"- *{name}*: {text}.\n" for name, text in engines.COLUMNS.items())
    tables = {
        ENGINES: table(["engine", *engines.COLUMNS], map(engine, engines.ROWS.values())) + f"\n{columns}",
        PATTERNS: table(["pattern", *patterns.COLUMNS.values()], map(pattern, patterns.ROWS)),
    }
    return {page: PLACE.sub(lambda _, text=text: f"\n{text}\n", page.read_text()) for page, text in tables.items()}


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)

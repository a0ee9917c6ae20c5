"""Writer of the table of patterns: ``python -m docs.patterns`` writes it into ``docs/frameworks.md``.

Each cell of the table names a test, or a section of a page, in ``tests/integrations/table.py``.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.integrations.table import COLUMNS, ROWS, Row

PAGE = Path(__file__).parent / "frameworks.md"
PLACE = re.compile(r"(?<=<!-- patterns -->\n).*(?=<!-- end -->)", re.DOTALL)


def cell(text: str) -> str:
    """Return a cell of the page."""
    outcome, _, shown = text.partition(" ")
    if outcome.startswith("J"):
        return f"[{outcome}](errors.md#{outcome.lower()})"
    return f"[yours](frameworks/{shown})" if outcome == "yours" else outcome


def line(row: Row) -> str:
    """Return the row of the table for one pattern."""
    return f"| {' | '.join([row.title, *(cell(getattr(row, column)) for column in COLUMNS)])} |"


def page() -> str:
    """Return the page, with the table of today."""
    head = ["| pattern | " + " | ".join(COLUMNS.values()) + " |", "| --- |" + " --- |" * len(COLUMNS)]
    table = "\n".join(["", *head, *map(line, ROWS), "", ""])
    return PLACE.sub(lambda _: table, PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())

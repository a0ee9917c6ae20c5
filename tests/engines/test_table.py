"""Each engine of the table is tested, and the page of engines is what the table says."""

from __future__ import annotations

import ast
from pathlib import Path

from docs.errors import texts
from docs.tables import ENGINES, pages
from tests.engines.table import COLUMNS, ROWS


def test_each_row_is_run() -> None:
    """By the name of its engine, in one of the tests beside this one."""
    files = [path for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__)]
    found = {
        node.value
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    stages = {name for name in ROWS if name.startswith("ZeRO ")}  # which tests/engines/test_deepspeed.py counts
    assert set(ROWS) - stages - found == set()


def test_the_page_is_that_of_the_table() -> None:
    assert ENGINES.read_text() == pages()[ENGINES], "run python -m docs.tables"


def test_each_error_of_the_table_exists() -> None:
    cells = {getattr(row, column) for row in ROWS.values() for column in COLUMNS}
    assert cells - {"yes", "no"} <= {code for text in texts() for code in text.codes}

"""Each engine of the table is tested."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.engines.table import ROWS


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

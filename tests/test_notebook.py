"""The notebook runs in place, as its users run it, and what it shows is what is stored in it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.selection import at_night

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "tutorials" / "notebook.ipynb"
MISSING = [name for name in ("ipykernel", "nbclient") if importlib.util.find_spec(name) is None]
# In a process of its own, since a client that ends leaves sockets to the garbage collector, which warns.
RUN = """
import sys
import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

path, connection = sys.argv[1:]
notebook = nbformat.read(path, nbformat.NO_CONVERT)
manager = AsyncKernelManager(kernel_name="python3", transport="ipc", connection_file=connection)
NotebookClient(notebook, km=manager, timeout=100).execute()
print(nbformat.writes(notebook))
"""


@pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed: pip install joinables[test]")
@at_night
def test_the_notebook_shows_what_is_stored_in_it(short_path: Path) -> None:
    folders = "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"
    result = subprocess.run(
        [sys.executable, "-c", RUN, str(NOTEBOOK), str(short_path / "kernel.json")],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **{name: str(short_path / name) for name in folders}},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    stored = shown(json.loads(NOTEBOOK.read_text()))
    assert shown(json.loads(result.stdout)) == stored
    assert "a picture" in stored
    (report,) = [text for text in stored if text.startswith("rank ")]
    for row in ("0 30 0", "1 12 18", "2 0 30"):  # rank, steps, shadowed
        assert f" {row} " in report


def shown(notebook: Any) -> list[str]:
    """What the cells show: text without what differs between machines, or that it is a picture."""
    found: list[str] = []
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            text = "a picture" if "image/png" in data else "".join(data.get("text/plain", output.get("text", "")))
            found.append(" ".join(re.sub(r"\d+\.\d+(e-\d+| s|%)?", "", text).split()))
    return found


def test_nothing_of_a_machine_is_stored() -> None:
    stored = json.loads(NOTEBOOK.read_text())
    assert set(stored["metadata"]) == {"kernelspec", "language_info"}
    for cell in stored["cells"]:
        assert cell["metadata"] == {}
        for output in cell.get("outputs", []):
            assert output["output_type"] != "error" and output.get("name") != "stderr"
    assert not any("/" in text for text in shown(stored)), "a path"

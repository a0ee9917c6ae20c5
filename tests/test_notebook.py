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

from tests.harness import at_night

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "tutorials" / "11_notebook.ipynb"
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


needs_jupyter = pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed: make test-scripts")


def executed(notebook: Path, folder: Path) -> Any:
    """The notebook as it is after all its cells have run."""
    folders = "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"
    result = subprocess.run(
        [sys.executable, "-c", RUN, str(notebook), str(folder / "kernel.json")],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **{name: str(folder / name) for name in folders}},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@needs_jupyter
@at_night
def test_a_regression_of_a_user(short_path: Path) -> None:
    cells = executed(ROOT / "tests" / "projects" / "regression.ipynb", short_path)["cells"]
    first, _, fit, predict, mistake = (cell["outputs"] for cell in cells if cell["cell_type"] == "code")
    assert len(first) == 1  # nothing warns
    *screen, result = fit
    assert {output["name"] for output in screen} == {"stderr"}
    bars = "".join("".join(output["text"]) for output in screen)
    assert "\x1b[A" not in bars and "Warning" not in bars
    last = bars.rstrip().rpartition("\r")[2]
    assert re.fullmatch(r"Epoch \d+: 100%.* 11/11 \[.*, loss=0\.\d+, val_loss=0\.\d+\]", last), last
    told = "".join(result["data"]["text/plain"])
    assert told.startswith("Result(stage='fit', epochs=") and len(told) < 250
    *_, text = ("".join(output["text"]) for output in predict if output["name"] == "stdout")
    assert len(numbers := re.findall(r"0\.\d{4}", text)) == 2 and numbers[0] == numbers[1], text
    error = mistake[-1]
    assert (error["ename"], error["evalue"][:43]) == ("RuntimeError", "mat1 and mat2 must have the same dtype, but")
    shown = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error["traceback"]))
    for line in ("return (self(x.double()) - y).square().mean()", "trainer.fit(Wrong(), DataLoader(training, 16))"):
        assert line in shown


@needs_jupyter
@at_night
def test_the_notebook_shows_what_is_stored_in_it(short_path: Path) -> None:
    stored = shown(json.loads(NOTEBOOK.read_text()))
    assert shown(executed(NOTEBOOK, short_path)) == stored
    assert "a picture" in stored
    (report,) = [text for text in stored if text.startswith("rank ")]
    for row in ("0 30 0", "1 12 18", "2 0 30"):  # rank, steps, shadowed
        assert f" {row} " in report


RANKS = """
from joinables import Join, testing

def steps(rank, counts):
    with Join([], process_group=None) as join:
        return sum(1 for _ in join.iterate(range(counts[rank])))

testing.run_ranks(steps, 3, (2, 0, 4), start_method="fork")
"""


@needs_jupyter
@at_night
def test_forked_ranks_run_functions_of_a_notebook(short_path: Path) -> None:
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "source": RANKS, "outputs": [], "execution_count": None}
    notebook = short_path / "ranks.ipynb"
    notebook.write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    assert shown(executed(notebook, short_path)) == ["[4, 4, 4]"]


def shown(notebook: Any) -> list[str]:
    """What the cells show: text without what differs between machines, or that it is a picture; no progress bars."""
    found: list[str] = []
    for cell in notebook["cells"]:
        for output in (each for each in cell.get("outputs", []) if each.get("name") != "stderr"):
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

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


needs_jupyter = pytest.mark.skipif(
    bool(MISSING), reason=f"{' and '.join(MISSING)} not installed: pip install joinables[test]"
)


def executed(notebook: Path, folder: Path) -> Any:
    """The notebook as it is after all its cells have run."""
    folders = "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"
    result = subprocess.run(
        [sys.executable, "-c", RUN, str(notebook), str(folder / "kernel.json")],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **{name: str(folder / name) for name in folders}},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


REGRESSION = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from joinables.trainer import Trainer, TrainModule
x = torch.randn(1000, 1000)
(x @ x).sum()  # on all threads
class Regression(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        return (self.net(batch[0]) - batch[1]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)
x = torch.randn(44, 2)
rows = TensorDataset(x, x.sum(1, keepdim=True))
data = DataLoader(rows, 4, shuffle=True, collate_fn=lambda rows: [torch.stack(part) for part in zip(*rows)])
module, trainer = Regression(), Trainer(devices=3, accelerator="cpu", max_epochs=30)
trainer.fit(module, data)
print(trainer.global_step, [round(weight, 2) for weight in module.net.weight.flatten().tolist()])
"""


@needs_jupyter
@at_night
def test_a_trainer_in_a_notebook(short_path: Path) -> None:
    cell = {"cell_type": "code", "source": REGRESSION, "metadata": {}, "outputs": [], "execution_count": None}
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    path = short_path / "regression.ipynb"
    path.write_text(json.dumps({"cells": [cell], "metadata": kernel, "nbformat": 4, "nbformat_minor": 4}))
    [output] = executed(path, short_path)["cells"][0]["outputs"]
    assert "".join(output["text"]) == "120 [1.0, 1.0]\n"


@needs_jupyter
@at_night
def test_the_notebook_shows_what_is_stored_in_it(short_path: Path) -> None:
    stored = shown(json.loads(NOTEBOOK.read_text()))
    assert shown(executed(NOTEBOOK, short_path)) == stored
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

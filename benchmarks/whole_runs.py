"""Whole runs of scripts: the trainer beside Lightning's ``ddp_spawn``, with 2 processes on the CPU.

memory    the largest memory of all processes of a script together, without that of the same script with hardly any
          data. Each page counts once, also if several processes share it (PSS). ``kept`` is the part that the system
          cannot take back: pages of files are not in it, since they can be read again
times     wall time of a script, imports included, as a ratio to Lightning's. The ways take turns in random order.
          ``again`` repeats the first way, so its ratio to that way shows the noise

The scripts differ only in their imports and in the arguments of the Trainer. Lightning is left out if it is not
installed. It returns no predictions of spawned processes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import save, table

HEADS = {
    "Trainer": """
from joinables.trainer import Trainer, TrainModule as Base
OPTIONS = dict(strategy="ddp", logger=False)
""",
    "Trainer, ddp_fork": """
from joinables.trainer import Trainer, TrainModule as Base
OPTIONS = dict(strategy="ddp_fork", logger=False)
""",
    "Lightning": """
import logging, warnings
warnings.simplefilter("ignore")
from lightning.pytorch import LightningModule as Base, Trainer
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
OPTIONS = dict(strategy="ddp_spawn", logger=False, enable_checkpointing=False, enable_model_summary=False)
""",
    "mp.spawn": "import torch.multiprocessing as mp",
}
BODY = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset

class Model(Base):
    def __init__(self, inputs, width):
        super().__init__()
        self.width = width
        self.net = torch.nn.Sequential(torch.nn.Linear(inputs, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0]).mean() + torch.zeros(self.width)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

def run(samples, inputs, batch, epochs, width=0):
    x, y = torch.ones(samples, inputs), torch.zeros(samples, dtype=torch.long)
    trainer = Trainer(devices=2, accelerator="cpu", max_epochs=epochs, enable_progress_bar=False, **OPTIONS)
    loader = DataLoader(TensorDataset(x, y), batch)
    if width:
        outputs = trainer.predict(Model(inputs, width), loader)
        assert sum(map(len, outputs)) == width * len(loader)
    else:
        trainer.fit(Model(inputs, width), loader)

if __name__ == "__main__":
    run(*map(int, sys.argv[1:]))
"""
SPAWN = """
def nothing(rank):
    pass

if __name__ == "__main__":
    mp.spawn(nothing, nprocs=2)
"""
RUNS = {"empty launch": (64, 64, 32, 0), "short fit": (2000, 64, 32, 2), "long fit": (16000, 64, 32, 12)}
"""Samples, inputs, batch size and epochs."""


def tree(root: int) -> list[int]:
    """Return the processes below and with ``root``."""
    found = [root]
    for process in found:
        for thread in Path(f"/proc/{process}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it has ended
                found += map(int, thread.read_text().split())
    return found


def used(root: int) -> tuple[int, int]:
    """Return the bytes of all pages of the processes below and with ``root``, and of those that are not of files."""
    total = files = 0
    for process in tree(root):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
        except OSError:
            continue
        kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        total += kilobytes["Pss"] << 10
        files += kilobytes["Pss_File"] << 10
    return total, total - files


def start(script: Path, arguments: tuple[int, ...]) -> subprocess.Popen[bytes]:
    ways = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, str(script), *map(str, arguments)], env=ways)


def peak(script: Path, arguments: tuple[int, ...]) -> tuple[int, int]:
    """Run a script, and return the largest values of :func:`used`."""
    process, largest = start(script, arguments), (0, 0)
    while process.poll() is None:
        largest = tuple(map(max, largest, used(process.pid)))
        time.sleep(0.03)
    if process.returncode:
        raise RuntimeError(f"{script} failed.")
    return largest


def timed(script: Path, arguments: tuple[int, ...]) -> float:
    """Return the seconds of a run that ends well. Lightning's workers abort now and then while they end."""
    for _ in range(10):
        began = time.perf_counter()
        if start(script, arguments).wait() == 0:
            return time.perf_counter() - began
        print(f"{script.name} {arguments} failed, and runs again", flush=True)
    raise RuntimeError(f"{script} failed ten times.")


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["memory", "times"])
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the data and of the predictions")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the times")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    options = parser.parse_args()
    has_lightning = importlib.util.find_spec("lightning") is not None
    names = [name for name in HEADS if has_lightning or name != "Lightning"]
    memory: dict[str, list[float]] = {}
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        scripts = {name: Path(folder, f"{number}.py") for number, name in enumerate(names)}
        for name, script in scripts.items():
            script.write_text(HEADS[name] + (SPAWN if name == "mp.spawn" else BODY))

        rows = options.megabytes * 25  # of 10,000 numbers
        large = {"data": (rows, 10_000, 50, 1), "predictions": (1000, 8, 10, 1, rows * 100)}
        small = {"data": (100, 10_000, 50, 1), "predictions": (1000, 8, 10, 1, 10)}
        for task in large if options.only != "times" else ():
            for name in names[:-1] if task == "data" else names[:2]:
                both = zip(peak(scripts[name], large[task]), peak(scripts[name], small[task]), strict=True)
                sizes = [(high - low) / (options.megabytes * 1e6) for high, low in both]
                memory[f"{task}: {name}"] = sizes
                print(f"memory for {task}, in their size: {name} {sizes[0]:.2f}, kept {sizes[1]:.2f}", flush=True)

        for task, arguments in RUNS.items() if options.only != "memory" else ():
            ways = {"again": scripts[base := "Lightning" if has_lightning else "Trainer"], **scripts}
            del ways["Trainer, ddp_fork"]
            measured: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(options.rounds):
                for name in random.sample(sorted(ways), len(ways)):
                    measured[name].append(timed(ways[name], () if name == "mp.spawn" else arguments))
            times |= {f"{task}: {name}": values for name, values in measured.items()}
            ratios = {name: [a / b for a, b in zip(measured[name], measured[base], strict=True)] for name in measured}
            lines = [(f"{task}: {name}", spread(values), spread(ratios[name])) for name, values in measured.items()]
            print(table(("times", "seconds", f"ratio to {base}"), lines), flush=True)
    save(options.json, memory=memory, times=times)


if __name__ == "__main__":
    main()

"""Loggers receive each value once, from rank 0."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from joinables.trainer import CSVLogger, FileCheckpointIO, ModelCheckpoint, Trainer
from tests.joinables.trainer.modules import Classifier, loader


def rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of the only log of CSVLogger below a folder, without the columns that a row leaves empty."""
    (path,) = folder.rglob("metrics.csv")
    with path.open(newline="") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


class Ends(Classifier):
    """Logs a value in the last hook."""

    def on_train_end(self) -> None:
        self.log("end", 2.0)


def test_a_row_for_each_epoch_and_evaluation(tmp_path: Path) -> None:
    module = Ends()
    module.hparams = {"width": 8}  # pyright: ignore
    run = Trainer(devices=2, max_epochs=2, logger=CSVLogger(tmp_path))
    run.fit(module, loader(36, 6), loader(12))
    first, second, end = rows(tmp_path)
    assert (first["epoch"], first["step"], end) == (1.0, 3.0, {"epoch": 2.0, "step": 6.0, "end": 2.0})
    assert second == {
        "epoch": 2.0,
        "step": 6.0,
        **{name: run.callback_metrics[name] for name in second.keys() & run.callback_metrics},
    }
    assert len(second) == 6
    assert json.loads((tmp_path / "hparams.json").read_text()) == module.hparams
    run.test(module, loader(12))
    assert rows(tmp_path)[3:] == [
        {"epoch": 2.0, "step": 6.0, **{f"test_{n}": run.callback_metrics[f"test_{n}"] for n in NAMES}}
    ]
    Trainer(logger=CSVLogger(tmp_path)).test(module, loader(12))
    assert len(rows(tmp_path)) == 5
    Trainer(logger=CSVLogger(tmp_path)).fit(module, loader(12))
    assert [row["step"] for row in rows(tmp_path)] == [3.0, 6.0, 6.0, 6.0, 0.0, 2.0, 2.0]


NAMES = "loss", "accuracy"


@pytest.mark.parametrize(("devices", "strategy"), [(1, "single"), (2, "ddp_fork")])
def test_a_rank_without_data_logs_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], devices: int, strategy: str
) -> None:
    run = Trainer(devices=devices, strategy=strategy, logger=CSVLogger(tmp_path))
    run.fit(Classifier(), loader(6))  # rank 1 has no data
    assert rows(tmp_path) == [{"epoch": 1.0, "step": 1.0, **run.callback_metrics}]
    assert capfd.readouterr() == ("", "")


class LogsSteps(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.logger.log_metrics({"half": 0.5}, self.trainer.global_step)


def test_rows_of_steps_stay(tmp_path: Path) -> None:
    Trainer(max_epochs=2, logger=CSVLogger(tmp_path)).fit(LogsSteps(), loader(12))
    found = rows(tmp_path)
    assert [row["step"] for row in found if row.get("half")] == [0.0, 1.0, 2.0, 3.0]
    assert [row["epoch"] for row in found if "epoch" in row] == [1.0, 2.0]


def test_metrics_with_the_names_of_the_columns(tmp_path: Path) -> None:
    run = Trainer(max_epochs=2, logger=CSVLogger(tmp_path))
    run.fit(Reserved(), loader(6))
    logged = {"epoch_logged": 0.5, "step_logged": 0.5}
    assert rows(tmp_path) == [{"epoch": count, "step": count, **logged} for count in (1.0, 2.0)]
    assert run.callback_metrics == {"epoch": 0.5, "step": 0.5}


class Reserved(Classifier):
    def shared_step(self, batch: Any, stage: str) -> torch.Tensor:
        self.log("epoch", 0.5)
        self.log("step", 0.5)
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])


class Silent(Classifier):
    def log(self, *args: Any, **options: Any) -> None: ...


def test_without_values_nothing_is_written(tmp_path: Path) -> None:
    for logger in (None, False):
        Trainer(logger=logger).fit(Classifier(), loader(12))
    Trainer(logger=CSVLogger(tmp_path)).predict(Classifier(), loader(12))
    for devices in (1, 2):
        Trainer(logger=CSVLogger(tmp_path), devices=devices).fit(Silent(), loader(12), loader(12))
    assert list(tmp_path.iterdir()) == []


class Loses(Classifier):
    """Loses its log in the first epoch."""

    def on_train_epoch_start(self) -> None:
        shutil.rmtree("logs", ignore_errors=True)


class Breaks:
    """Raises in one of its methods."""

    def __init__(self, where: str) -> None:
        self.where, self.rows = where, 0

    def log_metrics(self, metrics: Any, step: int) -> None:
        self.rows += 1
        self.reach("log_metrics")

    def log_hyperparams(self, params: Any) -> None:
        self.reach("log_hyperparams")

    def finalize(self, status: str) -> None:
        self.reach("finalize")

    def reach(self, where: str) -> None:
        if where == self.where:
            raise LookupError("no service")


def broken(tmp_path: Path, where: str) -> Any:
    if where == "folder":
        (tmp_path / "logs").touch()  # as a directory in which this process may not write
    return CSVLogger("logs") if where in ("folder", "lost") else Breaks(where)


@pytest.mark.parametrize("where", ["folder", "lost", "log_metrics", "log_hyperparams", "finalize"])
def test_a_log_never_ends_a_fit(tmp_path: Path, where: str) -> None:
    module, kept, other = Loses() if where == "lost" else Classifier(), broken(tmp_path, where), CSVLogger(tmp_path)
    module.hparams = {"width": 8, (1, 2): {3}}  # pyright: ignore
    run = Trainer(max_epochs=2, logger=[kept, other])
    with pytest.warns(
        UserWarning, match=r"logs no more metrics of this run, since it raised .*(logs|service)"
    ) as warned:
        run.fit(module, loader(12))
    assert (run.epochs, len(warned)) == (2, 1)
    assert len(rows(tmp_path)) == 2  # the other log is complete
    if isinstance(kept, Breaks):
        assert kept.rows == {"log_metrics": 1, "log_hyperparams": 0, "finalize": 2}[where]


@pytest.mark.parametrize("damage", ["cut", "empty", "header", "binary"])
def test_a_damaged_log_is_continued(tmp_path: Path, damage: str) -> None:
    module, run = Classifier(), Trainer(max_epochs=2, logger=CSVLogger(tmp_path))
    run.fit(module, loader(12))
    (path,) = tmp_path.rglob("metrics.csv")
    text = path.read_bytes()
    last = text.rindex(b"\n", 0, -1) + 1
    kept = {"cut": text[: last + 3], "empty": b"", "header": text[:9]}
    path.write_bytes(kept.get(damage, text[:last] + b"\xff"))
    Trainer(max_epochs=2, logger=CSVLogger(tmp_path)).fit(module, loader(12))
    assert [row["epoch"] for row in rows(tmp_path)] == [1.0] * (damage in ("cut", "binary")) + [1.0, 2.0]


def test_no_file_is_written_before_the_row_of_its_epoch(tmp_path: Path) -> None:
    """Or a fit that is killed in between, and resumed from the file, never writes the row."""

    class Disk(FileCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any) -> None:
            written.append([row["epoch"] for row in rows(tmp_path)])

    written: list[list[float]] = []
    run = Trainer(max_epochs=2, logger=CSVLogger(tmp_path), checkpoint_io=Disk(), callbacks=ModelCheckpoint(tmp_path))
    run.fit(Classifier(), loader(12))
    assert written == [[1.0], [1.0, 2.0]]


def test_a_row_that_did_not_fit_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run of the process does not continue it."""
    csv_logger, path = CSVLogger(tmp_path), tmp_path / "metrics.csv"

    def writerow(*_: Any) -> None:
        with path.open("a") as file:
            file.write("2,")
        raise OSError(28, "No space left on device")

    csv_logger.log_metrics({"epoch": 1, "loss": 1.0}, 1)
    with monkeypatch.context() as full, pytest.raises(OSError, match="No space"):
        full.setattr(csv.DictWriter, "writerow", writerow)
        csv_logger.log_metrics({"epoch": 2, "loss": 1.0}, 2)
    csv_logger.log_metrics({"epoch": 3, "loss": 1.0}, 3)
    assert [row["epoch"] for row in rows(tmp_path)] == [1.0, 3.0]


class Mine:
    """A logger of the user's."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        with self.path.open("a") as file:
            print(step, sorted(metrics), file=file)

    def log_hyperparams(self, params: Any) -> None: ...

    def finalize(self, status: str) -> None:
        self.log_metrics({status: 0.0}, 0)


def test_loggers_of_the_user(tmp_path: Path) -> None:
    mine, other = Mine(tmp_path / "mine"), CSVLogger(tmp_path)
    Trainer(devices=2, logger=[mine, other]).fit(Classifier(), loader(24, 6))
    assert mine.path.read_text() == "2 ['epoch', 'train_accuracy', 'train_loss']\n0 ['success']\n"
    assert len(rows(tmp_path)) == 1
    with pytest.raises(TypeError, match=r"logger='tb' has no methods log_metrics.*\[J642\]"):
        Trainer(logger="tb")

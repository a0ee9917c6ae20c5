"""Progress of a run on the screen: on rank 0, where somebody looks."""

from __future__ import annotations

import os
import pty
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from joinables.trainer import CSVLogger, Trainer
from joinables.trainer.loggers import is_watched
from tests.harness import Pool
from tests.joinables.trainer.modules import Classifier, dataset, loader
from tests.joinables.trainer.ranks import trainer


class PartLoader:
    """Has a number of batches that depends on the rank."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    def __len__(self) -> int:
        return self.counts[torch.distributed.get_rank() if torch.distributed.is_initialized() else 0]

    def __iter__(self) -> Iterator[Any]:
        return iter(list(DataLoader(dataset(6 * len(self), len(self)), 6)))


def test_a_line_shows_steps_metrics_and_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    run = Trainer(devices=2, strategy="ddp_fork", max_epochs=2, enable_progress_bar=True)
    module = Classifier()
    run.fit(module, loader(18, 6), loader(12, 6))
    run.test(module, loader(12, 6))
    lines = [line.split("\r") for line in capfd.readouterr().err.split("\n")[:-1]]
    assert [line[-1].split(":")[0] for line in lines] == ["Epoch 1", "Epoch 2", "test"]
    first, last = lines[0][0], lines[0][-2]
    assert first.startswith("Epoch 1: 1 of 2 batches, loss=") and first.endswith(", 2 of 2 ranks")
    assert last.startswith("Epoch 1: 2 of 2 batches, loss=") and last.rstrip().endswith(", 1 of 2 ranks")
    kept = lines[1][-1]
    for name in ("train_loss", "val_loss"):
        assert f"{name}={run.callback_metrics[name]:.4g}" in kept
    assert f"test_loss={run.callback_metrics['test_loss']:.4g}" in lines[2][-1]


def test_callbacks_that_are_replaced(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The line and the logger stay."""
    run = Trainer(devices=1, enable_progress_bar=True, logger=CSVLogger(tmp_path))
    run.callbacks = []
    run.fit(Classifier(), loader(12))
    assert "Epoch 1: train" in capfd.readouterr().err and (tmp_path / "metrics.csv").exists()


def test_a_line_says_for_how_many_ranks_the_first_waits(capfd: pytest.CaptureFixture[str]) -> None:
    run = Trainer(devices=2, strategy="ddp_fork", enable_progress_bar=True)
    run.fit(Classifier(), PartLoader([1, 4]))
    line, _ = capfd.readouterr().err.split("\n")
    assert line.startswith("Epoch 1: 1 of 4 batches, ") and "waits for 1 of 2 ranks\r" in line


def test_a_line_is_no_longer_than_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for columns, width in ((20, 19), (0, 35)):
        monkeypatch.setenv("COLUMNS", str(columns))
        Trainer(enable_progress_bar=True).fit(Classifier(), loader(12))
        first = capfd.readouterr().err.split("\r")[0]
        assert first.startswith("Epoch 1: 1 of 2 bat") and len(first) == width
    with pytest.raises(StopIteration):
        Trainer(enable_progress_bar=True).fit(Raises(), loader(12))
    assert capfd.readouterr().err.endswith("\n")


class Raises(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) if batch_idx == 0 else next(iter(()))


def steps(rank: int, counts: tuple[int, ...], **options: Any) -> None:
    run = trainer(enable_progress_bar=True, max_epochs=2, **options)
    run.fit(Classifier(), list(DataLoader(dataset(6 * counts[rank], rank), 6)), loader(12))


@pytest.mark.parametrize("counts", [(0, 2), (2, 0), (1, 3)])
def test_a_rank_without_data(pool: Pool, counts: tuple[int, ...]) -> None:
    pool.run(steps, counts, ranks=2)
    pool.run(steps, counts, ranks=2)


def test_a_terminal_and_a_notebook_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_watched()
    assert Trainer(logger=False).callbacks == []
    ends = pty.openpty()
    with os.fdopen(ends[1], "w") as terminal, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", terminal)
        assert is_watched()
        assert Trainer(enable_progress_bar=False, logger=False).callbacks == []
    os.close(ends[0])
    monkeypatch.setattr("builtins.__IPYTHON__", True, raising=False)
    assert is_watched()

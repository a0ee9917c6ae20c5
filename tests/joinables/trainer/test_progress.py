"""Progress of a run on the screen: on rank 0, where somebody looks."""

from __future__ import annotations

import os
import pty
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from joinables.trainer import Trainer
from joinables.trainer.progress import is_watched
from tests.harness import Pool
from tests.joinables.trainer.modules import Classifier, loader
from tests.joinables.trainer.ranks import trainer


class PartLoader:
    """Has a number of batches that depends on the rank."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    def __len__(self) -> int:
        return self.counts[torch.distributed.get_rank() if torch.distributed.is_initialized() else 0]

    def __iter__(self) -> Iterator[Any]:
        return iter(list(loader(6 * len(self), 6)))


@pytest.mark.parametrize("on_terminal", [True, False])
def test_a_bar_shows_steps_metrics_and_ranks(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, on_terminal: bool
) -> None:
    """A notebook shows the lines of two bars below each other, so it has one bar at a time."""
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: on_terminal)
    run = Trainer(devices=2, strategy="ddp_fork", max_epochs=2, enable_progress_bar=True)
    module = Classifier()
    run.fit(module, loader(18, 6), loader(12, 6))
    run.test(module, loader(12, 6))
    shown = capfd.readouterr().err
    assert ("\x1b[A" in shown) == on_terminal
    pictures = [each.rstrip() for each in shown.replace("\n", "\r").split("\r")]
    drawn = [each for each in pictures if each.startswith("Epoch 1:") and "ranks" in each]
    first, last = (next(each for each in drawn if f"{done}%" in each) for done in (50, 100))
    assert "train_loss=" in first and first.endswith("2 of 2 ranks]")
    assert last.endswith("1 of 2 ranks]")
    kept = next(each for each in reversed(pictures) if "Epoch 2: 100%" in each)
    assert kept.endswith(f"train_loss={run.metrics['train_loss']:.4g}, val_loss={run.metrics['val_loss']:.4g}]")
    assert any(each.startswith("validate: 100%") if on_terminal else each.endswith(", validate]") for each in pictures)
    assert any(each.endswith(f"test_loss={run.metrics['test_loss']:.4g}]") for each in pictures)


def test_the_bar_ends_with_the_longest_rank(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    run = Trainer(devices=2, strategy="ddp_fork", enable_progress_bar=True)
    run.fit(Classifier(), PartLoader([1, 4]))
    pictures = capfd.readouterr().err.split("\r")
    assert any("25%" in each and "1/4" in each and each.endswith("waits for 1 of 2 ranks]") for each in pictures)
    assert "4/4" in pictures[-1] and "train_loss" in pictures[-1]


def test_a_terminal_without_columns(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((0, 0)))
    monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda: lambda file: (0, 0))
    Trainer(enable_progress_bar=True).fit(Classifier(), loader(12))
    assert "train_loss=" in capfd.readouterr().err.split("\r")[-1]


def steps(rank: int, counts: tuple[int, ...], **options: Any) -> None:
    run = trainer(enable_progress_bar=True, max_epochs=2, **options)
    run.fit(Classifier(), list(loader(6 * counts[rank], 6)), loader(12))


@pytest.mark.parametrize("counts", [(0, 2), (2, 0), (1, 3)])
def test_a_rank_without_data(pool: Pool, counts: tuple[int, ...]) -> None:
    pool.run(steps, counts, ranks=2)
    pool.run(steps, counts, ranks=2)


def test_a_line_for_each_epoch_without_tqdm(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    run = Trainer(max_epochs=2, enable_progress_bar=True, logger=False)
    run.fit(Classifier(), loader(12), loader(12))
    lines = capfd.readouterr().err.splitlines()
    assert [line[:20] for line in lines] == ["Epoch 1: train_loss=", "Epoch 2: train_loss="]
    assert lines[1].endswith(f"val_loss={run.metrics['val_loss']:.4g}")


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

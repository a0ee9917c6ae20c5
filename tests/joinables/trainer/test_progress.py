"""Metrics on the screen: on rank 0, where somebody looks."""

from __future__ import annotations

import os
import pty
import sys

import pytest

from joinables.trainer import Trainer
from joinables.trainer.loggers import is_watched
from tests.joinables.trainer.modules import Classifier, loader


def test_a_line_for_each_epoch_and_evaluation(capfd: pytest.CaptureFixture[str]) -> None:
    run = Trainer(devices=2, strategy="ddp_fork", max_epochs=2, enable_progress_bar=True)
    module = Classifier()
    run.fit(module, loader(18, 6), loader(12, 6))
    run.test(module, loader(12, 6))
    first, second, test = capfd.readouterr().err.splitlines()
    assert first.startswith("[rank 0] Epoch 1, step 2: train_")
    for line, names in ((second, ("train_loss", "val_loss")), (test, ("test_loss",))):
        assert line.startswith("[rank 0] Epoch 2, step 4: ")
        for name in names:
            assert f"{name}={run.callback_metrics[name]:.4g}" in line


def test_a_terminal_and_a_notebook_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_watched() and not Trainer().enable_progress_bar
    ends = pty.openpty()
    with os.fdopen(ends[1], "w") as terminal, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", terminal)
        assert is_watched() and Trainer().enable_progress_bar
        assert not Trainer(enable_progress_bar=False).enable_progress_bar
    os.close(ends[0])
    monkeypatch.setattr("builtins.__IPYTHON__", True, raising=False)
    assert is_watched()

"""What a module and its callbacks gain in a run comes home to the process that called."""

from __future__ import annotations

import pickle
import select
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import pytest
import torch

from joinables.trainer import NotPicklable, Trainer
from tests.harness import Pool
from tests.joinables.trainer.modules import Classifier, loader
from tests.joinables.trainer.ranks import trainer


class Gains(Classifier):
    """Gains an attribute in a hook, and fails with its results in a way, if it is one of these."""

    def __init__(self, fails: str = "") -> None:
        super().__init__()
        self.fails, self.steps = fails, list[Any]()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.gained = torch.full((50_000,), float(self.trainer.global_step))

    def results_to_return(self) -> Any:
        if self.fails == "raises":
            raise KeyError(self.fails)
        gained = (lambda: None) if self.fails == "cannot be pickled" else getattr(self, "gained", None)
        return {"gained": gained, "rank": self.trainer.global_rank}

    def take_results(self, results: Any) -> None:
        if self.fails == "at home":
            raise KeyError(self.fails)
        self.taken = results


def assert_taken(module: Gains) -> None:
    assert module.taken["gained"].equal(torch.full((50_000,), 2.0)) and module.taken["rank"] == 0


@pytest.mark.parametrize(("devices", "strategy"), [(1, "auto"), (2, "ddp"), (2, "ddp_fork")])
def test_results_come_home(monkeypatch: pytest.MonkeyPatch, devices: int, strategy: str) -> None:
    """In the one tuple of the launch, as long as they are."""
    module, get, got = Gains(), SimpleQueue.get, list[Any]()
    monkeypatch.setattr(SimpleQueue, "get", lambda self: got.append(get(self)) or got[-1])
    run = Trainer(devices=devices, strategy=strategy, accelerator="cpu")
    run.fit(module, loader(12 if devices == 1 else 18, 6))  # of two ranks, the second has one batch less
    assert_taken(module)
    assert len(got) == devices - 1
    for is_tuple, *fields in got:
        assert is_tuple and fields[0] is None
        assert len(pickle.dumps(fields)) < select.PIPE_BUF
    run.validate(module, loader(6))
    assert module.taken["rank"] == 0


def in_place(rank: int) -> Any:
    module = Gains()
    trainer().fit(module, loader(18, 6))
    if rank == 0:
        assert_taken(module)
    return hasattr(module, "taken")


def test_under_a_launcher_rank_0_has_them(pool: Pool) -> None:
    assert pool.run(in_place, ranks=2) == [True, False]


@pytest.mark.parametrize("fails", ["raises", "cannot be pickled", "at home"])
def test_a_failure_with_results_loses_nothing(tmp_path: Path, fails: str) -> None:
    alone, module = Classifier(), Gains(fails)
    Trainer(devices=1).fit(alone, loader(6))
    run = Trainer(devices=2, default_root_dir=tmp_path)
    with pytest.raises((KeyError, NotPicklable)):
        run.fit(module, loader(6))
    if fails == "at home":
        assert (run.epochs, run.global_step) == (1, 1) and run.save_checkpoint(tmp_path / "after.ckpt")
    (file,) = tmp_path.glob("trained-*.ckpt")
    torch.testing.assert_close(torch.load(file, weights_only=True)["module"], dict(alone.state_dict()))

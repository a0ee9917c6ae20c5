"""Nothing that was trained is lost by a failure after training."""

from __future__ import annotations

import copy
import errno
import os
import re
import signal
import sys
import tempfile
import threading
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from join.collectives.timeouts import TIMEOUTS
from joinables.trainer import Callback, NotPicklable, Trainer, WorkerDied, launch
from joinables.trainer import trainer as trainer_module
from joinables.trainer.checkpoint import keep_trained
from tests.ending import Ending
from tests.harness import all_or_each, in_test_all
from tests.joinables.trainer.modules import FEATURES, Classifier, loader
from tests.joinables.trainer.ranks import trainer


class Changes(Classifier):
    """Changes its parts in a hook of the fit."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change
        self.register_buffer("bank", torch.zeros(0, FEATURES))
        self.spare = nn.Linear(2, 2).requires_grad_(False)

    def on_train_start(self) -> None:
        getattr(self, self.change)()

    def gains_a_copy(self) -> None:
        self.ema = copy.deepcopy(self.body).requires_grad_(False)

    def grows_a_buffer(self) -> None:
        self.bank = torch.ones(2, FEATURES)

    def loses_a_part(self) -> None:
        del self.spare


def trained(files: Path) -> dict[str, Any]:
    (file,) = files.glob("trained-*.ckpt")
    return torch.load(file, weights_only=True)["module"]


@pytest.mark.parametrize("change", ["gains_a_copy", "grows_a_buffer", "loses_a_part"])
def test_a_module_that_a_hook_changes(tmp_path: Path, change: str) -> None:
    """Weights that fit are loaded, and a file has all."""
    here, alone = Changes(change), Changes(change)
    trainer = Trainer(devices=2, max_epochs=2, default_root_dir=tmp_path)
    with pytest.warns(UserWarning, match=r"This Changes could not load all .* trained-epoch=2-step=2|trained-epoch=2"):
        trainer.fit(here, loader(6))  # one batch: rank 1 has none
    Trainer(devices=1, max_epochs=2).fit(alone, loader(6))
    expected = dict(alone.state_dict())
    torch.testing.assert_close(trained(tmp_path), expected)
    torch.testing.assert_close(here.body.state_dict(), alone.body.state_dict())
    assert trainer.global_step == 2


def test_a_second_failure_leaves_the_file_of_the_first(tmp_path: Path) -> None:
    for number in range(3):
        state = {"epochs": 1, "global_step": 2, "module": {"number": torch.tensor(number)}}
        keep_trained(tmp_path, state)
    names = [f"trained-epoch=1-step=2{end}.ckpt" for end in ("", "-v1", "-v2")]
    assert [torch.load(tmp_path / name)["module"]["number"].item() for name in names] == [0, 1, 2]


class Fails(Callback):
    """Fails after training: in a hook or a state, in the workers or at home."""

    def __init__(self, where: str) -> None:
        self.where, self.is_trained, self.is_over = where, False, False

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.is_trained = True
        if self.where == "hook":
            raise KeyError(self.where)
        if self.where == "exit" and trainer.global_rank == 0:
            sys.exit("text")

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        if self.where == f"end of rank {trainer.global_rank}":
            raise KeyError(self.where)
        if self.where == f"death of rank {trainer.global_rank}":
            os._exit(3)
        if self.where == f"interrupt of rank {trainer.global_rank}":
            raise KeyboardInterrupt
        if self.where == "Ctrl-C" and trainer.global_rank == 1:
            while not list(Path(tempfile.gettempdir()).glob("*/trained")):
                threading.Event().wait(0.01)
            os.kill(trainer.run.task.home, signal.SIGINT)
            threading.Event().wait()
        self.is_over = self.where == f"result of rank {trainer.global_rank}"

    def state_dict(self) -> dict[str, Any]:
        if self.is_over:
            raise KeyError(self.where)
        return {"function": lambda: None} if self.where == "state" and self.is_trained else {"is": self.is_trained}

    def load_state_dict(self, state: Any) -> None:
        if self.where == "load" and state["is"]:
            raise KeyError(self.where)


class FailsBefore(Classifier):
    """Fails after the last step, and before the end of the epoch."""

    where = ""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert self.where != "validation"

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert self.where != "checkpoint"

    def on_train_epoch_end(self) -> None:
        if self.where == "death":
            os.kill(os.getpid(), signal.SIGKILL)


class StopsInBatch(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        trainer.should_stop = True


@pytest.mark.parametrize(
    ("where", "limit"),
    all_or_each(product(["validation", "checkpoint", "death"], ["max_epochs", "max_steps", "should_stop"])),
)
def test_a_failure_after_the_last_step(tmp_path: Path, where: str, limit: str) -> None:
    alone, module = Classifier(), FailsBefore()
    Trainer(devices=1).fit(alone, loader(6))
    module.where = where
    limits: dict[str, Any] = {limit: 1} if limit != "should_stop" else {"max_epochs": 5, "callbacks": StopsInBatch()}
    run = Trainer(devices=2, **limits, default_root_dir=tmp_path, strategy="ddp_fork")
    with pytest.raises((AssertionError, WorkerDied)):
        run.fit(module, loader(6), loader(6))
    torch.testing.assert_close(trained(tmp_path), dict(alone.state_dict()))


class Swaps(Classifier):
    """Swaps weights in after the last epoch, such as their averages."""

    def on_train_epoch_end(self) -> None:
        for tensor in self.parameters():
            tensor.detach().fill_(7)


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_that_the_last_epoch_end_swaps_in(tmp_path: Path, ranks: int) -> None:
    run = Trainer(devices=ranks, accelerator="cpu", callbacks=Fails("hook"), default_root_dir=tmp_path)
    with pytest.raises(KeyError):
        run.fit(Swaps(), loader(6), loader(6))
    assert all((value == 7).all() for value in trained(tmp_path).values())


def test_a_fit_that_trains_nothing_leaves_no_file(tmp_path: Path) -> None:
    run = Trainer(devices=2, accelerator="cpu", max_epochs=0, callbacks=Fails("hook"), default_root_dir=tmp_path)
    with pytest.raises(KeyError) as caught:
        run.fit(Classifier(), loader(6))
    assert "was trained" not in str(vars(caught.value).get("__notes__")) and not list(tmp_path.iterdir())


RANKS = [f"{what} of rank {rank}" for what, rank in all_or_each(product(("end", "interrupt", "result"), (0, 1)))]


@pytest.mark.parametrize("where", ["hook", "state", "load", "exit", "death of rank 1", *RANKS])
def test_a_failure_after_training(tmp_path: Path, where: str) -> None:
    alone = Classifier()
    Trainer(devices=1).fit(alone, loader(6))
    with pytest.raises((KeyError, NotPicklable, WorkerDied, KeyboardInterrupt)) as caught:
        Trainer(devices=2, callbacks=Fails(where), default_root_dir=tmp_path).fit(Classifier(), loader(6))
    torch.testing.assert_close(trained(tmp_path), dict(alone.state_dict()))
    if sys.version_info >= (3, 11):
        told = r"torch\.load\('.*trained-epoch=1-step=1\.ckpt'\)\['module'\]"
        assert re.search(told, str(vars(caught.value)["__notes__"]))


def test_ctrl_c_after_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    alone = Classifier()
    Trainer(devices=1).fit(alone, loader(6))
    run = Trainer(devices=2, strategy="ddp_fork", callbacks=Fails("Ctrl-C"))
    with pytest.raises(KeyboardInterrupt):
        run.fit(Classifier(), loader(6))  # rank 1 has no data
    torch.testing.assert_close(trained(tmp_path), dict(alone.state_dict()))


def fails(rank: int, folder: Path) -> None:
    run = trainer(callbacks=Fails("hook"), default_root_dir=folder)
    with pytest.raises(KeyError):
        run.fit(Classifier(), list(loader(6 * (rank == 0), 6)))


def test_one_rank_saves_under_a_launcher(ending: Ending, tmp_path: Path) -> None:
    alone = Classifier()
    Trainer(devices=1).fit(alone, loader(6))
    ending.run(fails, tmp_path, ranks=3)
    torch.testing.assert_close(trained(tmp_path), dict(alone.state_dict()))


def test_a_single_process_saves_too(tmp_path: Path) -> None:
    module = Classifier()
    with pytest.raises(KeyError):
        Trainer(devices=1, callbacks=Fails("hook")).fit(module, loader(6))
    torch.testing.assert_close(trained(tmp_path), dict(module.state_dict()))


def test_a_result_that_does_not_fit_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(value: Any, path: Path) -> None:
        if path.name == "trained":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(value, path)

    write = launch.write
    monkeypatch.setattr(trainer_module, "write", full)
    with pytest.raises(OSError, match="No space left"):
        Trainer(devices=2, strategy="ddp_fork", default_root_dir=tmp_path).fit(Classifier(), loader(6))
    assert trained(tmp_path)["body.0.weight"].shape == (8, FEATURES)


class Extra(Classifier):
    """Has an extra state that cannot be pickled, or not even be read, after the fit."""

    divisor = 1
    is_over = False

    def on_train_end(self) -> None:
        self.is_over = True

    def get_extra_state(self) -> Any:
        return {"pickled": lambda: None, "read": 1 / self.divisor} if self.is_over else {}

    def set_extra_state(self, state: Any) -> None: ...


class Unreadable(Extra):
    divisor = 0


@in_test_all
@pytest.mark.parametrize("kind", [Extra, Unreadable])
def test_an_extra_state_that_cannot_be_sent(tmp_path: Path, kind: type[Extra]) -> None:
    with pytest.raises((NotPicklable, ZeroDivisionError)):
        Trainer(devices=2, default_root_dir=tmp_path).fit(kind(), loader(6))
    assert trained(tmp_path).keys() >= dict(Classifier().named_parameters()).keys()


class FailsOnRank1(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_rank == 1:
            raise KeyError


@in_test_all
def test_a_result_takes_longer_to_write_than_the_launch_waits_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(value: Any, write: Any) -> None:
        if isinstance(value, dict) and "module" in value:
            threading.Event().wait(
                3.0
            )  # the launch would end this rank now, if another rank could fail in a later hook
        save(value, write)

    save = launch.save
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(launch, "save", slow)
    monkeypatch.setattr(TIMEOUTS, "first", 0.0)
    with pytest.raises(KeyError):
        Trainer(devices=2, strategy="ddp_fork", default_root_dir=tmp_path).fit(FailsOnRank1(), loader(6), loader(12))
    assert trained(tmp_path)


class Loads(Classifier):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        raise KeyError("own")


def test_a_module_whose_load_state_dict_raises(tmp_path: Path) -> None:
    here, alone = Loads(), Classifier()
    Trainer(devices=1).fit(alone, loader(6))
    with pytest.warns(UserWarning, match=r"its load_state_dict raised \(KeyError: 'own'\).*trained-epoch=1"):
        Trainer(devices=2, default_root_dir=tmp_path).fit(here, loader(6))
    torch.testing.assert_close(trained(tmp_path), dict(alone.state_dict()))

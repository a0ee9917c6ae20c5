"""Checkpoints in the middle of an epoch, and going on from there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="needs the extra lightning: make test-frameworks")

import lightning.pytorch as pl  # pyright: ignore[reportMissingImports]
import torch

from tests.ending import Ending
from tests.integrations.lightning.training import (
    Case,
    Counting,
    Module,
    batch,
    build,
    in_one_process,
    quiet,
    trainer_of,
)


class Resumable:
    """Batches that can be gone on with."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count
        self.state = {"at": 0, "epoch": 0}
        self.read: list[tuple[int, int]] = []

    def __iter__(self) -> Iterator[Any]:
        epoch = self.state["epoch"]
        for step in range(self.state["at"], self.count):
            self.state["at"] = step + 1
            self.read.append((epoch, step))
            yield batch(self.rank, step, epoch)
        self.state |= {"at": 0, "epoch": epoch + 1}

    def state_dict(self) -> dict[str, int]:
        return self.state  # and not a copy

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state |= state


def train(rank: int, case: Case, folder: str, resume: str | None) -> tuple[list[torch.Tensor], Any]:
    quiet(rank)
    saves = pl.callbacks.ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=1, save_top_k=-1, save_on_train_epoch_end=False
    )
    trainer = trainer_of(case, enable_checkpointing=not resume, callbacks=[] if resume else [saves])
    module, loader = Module(case), Resumable(rank, case.counts[rank])
    trainer.fit(module, loader, ckpt_path=resume and f"{folder}/{resume}")
    return module.state(), loader.read


@pytest.mark.parametrize("counts", [(5, 2), (0, 3)], ids=str)
def test_to_go_on_is_as_never_to_have_stopped(ending: Ending, tmp_path: Path, counts: tuple[int, int]) -> None:
    case = Case(counts=counts, norm=0 in counts)
    expected = in_one_process(case)
    for state, _ in ending.run(train, case, str(tmp_path), None, ranks=2):
        torch.testing.assert_close(state, expected, rtol=1e-4, atol=2e-6)
    length = max(counts)
    for step in (1, length - 1, length, length + 1):
        name = f"step={step}.ckpt"
        for rank, (state, read) in enumerate(ending.run(train, case, str(tmp_path), name, ranks=2)):
            torch.testing.assert_close(state, expected, rtol=1e-4, atol=2e-6)
            places = [(epoch, at) for epoch in (0, 1) for at in range(counts[rank]) if epoch * length + at >= step]
            assert read == places, name


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_checkpoint_has_the_buffers_of_the_rank_with_data(ending: Ending, tmp_path: Path, step: int) -> None:
    case = Case(counts=(0, 3), norm=True, epochs=1)
    ending.run(train, case, str(tmp_path), None, ranks=2)
    saved = torch.load(tmp_path / f"step={step}.ckpt")["state_dict"]
    expected = in_one_process(replace(case, max_steps=step))
    net = build(case)
    names = [*dict(net.named_parameters()), *dict(net.named_buffers())]
    for name, value in zip(names, expected, strict=False):
        torch.testing.assert_close(saved[f"net.{name}"], value, rtol=1e-4, atol=2e-6)


class SavesInWindow(pl.Callback):
    """Saves when the first batch of the first window is over."""

    def __init__(self, file: str) -> None:
        self.file = file

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.current_epoch == trainer.global_step == 0 and args[-1] == 0:
            trainer.save_checkpoint(self.file)


def train_from_within(rank: int, case: Case, file: str, resume: bool) -> list[torch.Tensor]:
    quiet(rank)
    module, loader = Module(case), Resumable(rank, case.counts[rank])
    trainer = trainer_of(case, callbacks=[] if resume else [SavesInWindow(file)])
    trainer.fit(module, loader, ckpt_path=file if resume else None)
    return module.state()


def test_to_go_on_in_the_middle_of_a_window(ending: Ending, tmp_path: Path) -> None:
    case, file = Case(counts=(2, 6), accumulate=3), str(tmp_path / "inside.ckpt")
    ending.run(train_from_within, case, file, False, ranks=2)
    expected = in_one_process(replace(case, lost=1))
    for state in ending.run(train_from_within, case, file, True, ranks=2):
        torch.testing.assert_close(state, expected, rtol=1e-4, atol=2e-6)


class Numbers:
    """Samples of a rank, in order."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        return (torch.tensor(100.0 * self.rank + index),)


class NumberStream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, rank: int, count: int) -> None:
        self.numbers, self.at = Numbers(rank, count), 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        while self.at < len(self.numbers):
            self.at += 1
            yield self.numbers[self.at - 1]
        self.at = 0


def count(rank: int, kind: Any, folder: str, steps: list[int]) -> list[list[int]]:
    """Train on numbers, and again from the checkpoint after each of these steps."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    quiet(rank)
    found = list[list[int]]()
    saves = pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    for step in (None, *steps):
        module = Counting(Case())
        more = {"enable_checkpointing": step is None, "callbacks": [saves] if step is None else []}
        trainer = trainer_of(Case(epochs=2), use_distributed_sampler=False, **more)
        loader = StatefulDataLoader(kind(rank, (5, 2)[rank]), batch_size=1)
        trainer.fit(module, loader, ckpt_path=step and f"{folder}/step={step}.ckpt")
        found.append(module.seen)
    return found


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", [Numbers, NumberStream])
def test_torchdata_s_loader_goes_on_from_each_step(ending: Ending, tmp_path: Path, kind: Any) -> None:
    """Also from the last step of an epoch, where the loader of one rank has a length that is the limit of Lightning."""
    pytest.importorskip("torchdata")
    steps = list(range(1, 10))
    for rank, (whole, *others) in enumerate(ending.run(count, kind, str(tmp_path), steps, ranks=2)):
        places = [(epoch, at) for epoch in (0, 1) for at in range((5, 2)[rank])]
        assert whole == [100 * rank + at for _, at in places]
        for step, seen in zip(steps, others, strict=True):
            assert seen == [100 * rank + at for epoch, at in places if 5 * epoch + at >= step], step

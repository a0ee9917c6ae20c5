"""A fit that another number of ranks goes on with in the middle of an epoch: each sample once, as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from join import PeerError
from joinables.trainer import Callback, ModelCheckpoint
from tests.harness import Pool, all_or_each
from tests.joinables.trainer.modules import Classifier, dataset
from tests.joinables.trainer.ranks import trainer
from tests.training import TOLERANCE, assert_same, flat_state

GLOBAL_BATCH = 12
SAMPLES = 50


RANKS = [((3,), 2), ((2,), 1), ((1,), 3), ((3, 2), 1)]
"""Numbers of ranks that are interrupted, and of those that resume."""


class Seen(Classifier):
    """Remembers which samples it was given, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch[2].tolist())
        return super().training_step(batch[:2], batch_idx)


class Interrupt(Exception):
    """What ends a fit from within."""


class Stops(Callback):
    """Raises before a step."""

    def __init__(self, after: int) -> None:
        self._after = after

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._after:
            raise Interrupt


def fit(rank: int, ranks: int, folder: str, accumulate: int, stop: int | None, resume: bool) -> Any:
    module = Seen()
    keeper = ModelCheckpoint(folder, save_last=True, save_top_k=0, every_n_train_steps=1)
    callbacks: list[Callback] = [keeper] if stop is None else [keeper, Stops(stop)]
    run = trainer(seed=1, max_epochs=2, callbacks=callbacks, accumulate_grad_batches=accumulate)
    numbered = TensorDataset(*dataset(SAMPLES).tensors, torch.arange(SAMPLES))
    data = DataLoader(numbered, GLOBAL_BATCH // ranks, shuffle=True)
    try:
        run.fit(module, data, ckpt_path=Path(folder) / "last.ckpt" if resume else None)
    except (Interrupt, PeerError):
        return module.seen
    return (
        flat_state(module.state_dict(), [run.global_step, run.current_epoch]),
        run.callback_metrics["train_loss"],
        module.seen,
    )


@pytest.mark.parametrize(
    ("before", "after", "accumulate", "done"),
    all_or_each((*ranks, *steps) for ranks in RANKS for steps in [(1, 0), (1, 1), (2, 1)]),
)
def test_another_number_of_ranks_goes_on(
    pool: Pool, tmp_path: Path, before: tuple[int, ...], after: int, accumulate: int, done: int
) -> None:
    """All batches of a step together are those of one process, whoever has them.

    The first ranks stop after so many steps of the second epoch, those that go on each after one more.
    """
    folder, seen = str(tmp_path / "interrupted"), list[int]()
    steps = -(-SAMPLES // (GLOBAL_BATCH * accumulate))  # of an epoch
    for leg, ranks in enumerate(before):
        found = pool.run(fit, ranks, folder, accumulate, steps + done + leg, leg > 0, ranks=ranks)
        seen += [sample for rank in found for batch in rank for sample in batch]
    ended = pool.run(fit, after, folder, accumulate, None, True, ranks=after)
    ((expected, loss, whole),) = pool.run(fit, 1, str(tmp_path / "whole"), accumulate, None, False, ranks=1)
    for state, found_loss, _ in ended:
        assert_same(state, expected, TOLERANCE)
        assert found_loss == pytest.approx(loss, abs=TOLERANCE)
    seen += [sample for _, _, rank in ended for batch in rank for sample in batch]
    assert sorted(seen) == sorted(2 * list(range(SAMPLES))) == sorted(sample for batch in whole for sample in batch)


class Dealt(IterableDataset[Any]):
    """Deals itself out."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    def __iter__(self) -> Any:
        numbered = TensorDataset(*dataset(SAMPLES).tensors, torch.arange(SAMPLES))
        return iter(list(DataLoader(numbered, 3))[self._rank :: self._ranks])


def of_ones_own(rank: int, ranks: int, folder: str, resume: bool) -> str:
    """Batches that the trainer does not deal out."""
    module = Seen()
    keeper = ModelCheckpoint(folder, save_last=True, save_top_k=0, every_n_train_steps=1)
    run = trainer(seed=1, max_epochs=2, callbacks=[keeper, Stops(2)])
    try:
        run.fit(
            module,
            DataLoader(Dealt(rank, ranks), batch_size=None),
            ckpt_path=Path(folder) / "last.ckpt" if resume else None,
        )
    except (Interrupt, PeerError, ValueError) as error:
        return str(error)
    return "fine"


def test_what_cannot_be_dealt_out_anew(pool: Pool, tmp_path: Path) -> None:
    pool.run(of_ones_own, 3, str(tmp_path), False, ranks=3)
    for told in pool.run(of_ones_own, 2, str(tmp_path), True, ranks=2):
        assert told.startswith("3 ranks wrote the checkpoint in the middle of an epoch, and 2 ranks cannot share")

"""An exception on one rank, in whatever phase of a run, reaches all other ranks with its cause."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from joinables.trainer import ModelCheckpoint
from tests.ending import Ending, assert_blamed
from tests.joinables.trainer.modules import Classifier, dataset, loader
from tests.joinables.trainer.ranks import trainer

FIT = ["setup", "configure_optimizers", "on_train_start", "on_train_epoch_start", "on_train_batch_start"]
FIT += ["training_step", "on_before_optimizer_step", "on_train_batch_end", "validation_step", "on_validation_epoch_end"]
FIT += ["on_train_epoch_end", "on_train_end", "teardown", "reading", "reading to validate"]
OF_RANK_0 = ["prepare_data", "on_save_checkpoint", "add_to_queue"]


class Breaks:
    """Batches, of which the second cannot be read."""

    def __init__(self, breaks: bool, seed: int) -> None:
        self.batches = list(zip(*(part.split(6) for part in dataset(18, seed).tensors), strict=True))
        self.breaks = breaks

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.batches):
            if self.breaks and index == 1:
                raise LookupError("in reading")
            yield batch


def fails(rank: int, where: str, who: int, folder: Path) -> None:
    def fail(*_: Any) -> None:
        raise LookupError(f"in {where}")

    module, (data, val_data) = Classifier(), (Breaks(rank == who and where == name, rank) for name in FIT[-2:])
    if rank == who and where not in FIT[-2:]:
        setattr(module, where, fail)
    keeper = ModelCheckpoint(folder, every_n_train_steps=1)
    trainer(callbacks=keeper, default_root_dir=folder).fit(module, data, val_data)


@pytest.mark.parametrize("where", [*FIT, *OF_RANK_0])
def test_a_fit(ending: Ending, tmp_path: Path, where: str) -> None:
    who = 0 if where in OF_RANK_0 else 1
    ends = ending.ends(fails, where, who, tmp_path, ranks=3)
    texts = [end.error.partition("\n")[0] for end in ends]  # the second line of rank 0 names the file of the weights
    assert_blamed(texts, who, f"LookupError: in {where.removesuffix(' to validate')}")


def evaluates(rank: int, stage: str, where: str) -> None:
    def fail(*_: Any) -> None:
        raise LookupError(f"in {where}")

    module = Classifier()
    if rank == 1:
        setattr(module, where, fail)
    getattr(trainer(), stage)(module, loader(54, 6))


@pytest.mark.parametrize(("stage", "where"), [("test", "test_step"), ("predict", "predict_step"), ("predict", "setup")])
def test_an_evaluation(ending: Ending, stage: str, where: str) -> None:
    ends = ending.ends(evaluates, stage, where, ranks=3)
    assert_blamed([end.error for end in ends], 1, f"LookupError: in {where}")

"""Changes between the epochs of a fit, and between two fits of a trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from joinables.trainer import Callback, ModelCheckpoint, Trainer, UnevenDistributedSampler
from tests.harness import Pool
from tests.joinables.trainer.modules import Classifier, dataset, loader
from tests.joinables.trainer.ranks import trainer
from tests.training import TOLERANCE, assert_same, flat_state


class AtEpoch(Callback):
    """Calls a function when an epoch, or its batch with an index, begins."""

    def __init__(self, epoch: int, change: Callable[[Trainer, Any], object], index: int | None = None) -> None:
        self.epoch, self.index, self.change = epoch, index, change

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if self.index is None and trainer.current_epoch == self.epoch:
            self.change(trainer, module)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.index and trainer.current_epoch == self.epoch:
            self.change(trainer, module)


class Doubled(Classifier):
    def shared_step(self, batch: Any, stage: str) -> torch.Tensor:
        return super().shared_step((batch[0].to(self.body[0].weight.dtype), batch[1]), stage)  # pyright: ignore[reportArgumentType]


def doubles(rank: int, samples: int, ranks: int) -> Any:
    module = Doubled(optimizer="sgd")
    change = AtEpoch(1, lambda trainer, module: module.double())
    trainer(max_epochs=3, callbacks=change).fit(module, loader(samples, 12 // ranks))
    return flat_state(module.state_dict())


@pytest.mark.parametrize("samples", [48, 5])
def test_another_dtype(pool: Pool, samples: int) -> None:
    for state in pool.run(doubles, samples, 2, ranks=2):
        assert_same(state, doubles(0, samples, 1), TOLERANCE)


class Shares(Sampler[int]):
    """Has the same numbers of samples on both ranks, until the second begins to have fewer."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.num_replicas, self.fewer = rank, ranks, False

    def __iter__(self) -> Iterator[int]:
        blocks = [range(12)] if self.fewer else [range(12), range(12, 24)]
        size = 12 // self.num_replicas
        for block in blocks if self.rank == 0 or not self.fewer else ():
            yield from block[:6] if self.fewer else block[self.rank * size : (self.rank + 1) * size]

    def __len__(self) -> int:
        return len(list(iter(self)))


def shrinks(rank: int, ranks: int) -> Any:
    module, sampler = Classifier(), Shares(rank, ranks)
    change = AtEpoch(1, lambda trainer, module: setattr(sampler, "fewer", True))
    run = trainer(max_epochs=2, callbacks=change)
    run.fit(module, DataLoader(dataset(), 12 // ranks, sampler=sampler))
    return flat_state(module.state_dict(), [run.global_step])


def test_a_sampler_that_becomes_uneven(pool: Pool) -> None:
    for state in pool.run(shrinks, 2, ranks=2):
        assert_same(state, shrinks(0, 1), TOLERANCE)


def test_a_data_set_that_grows() -> None:
    data: Any = list(zip(*dataset(8).tensors, strict=True))
    run = trainer(max_epochs=2, callbacks=AtEpoch(1, lambda trainer, module: data.extend(data[:7])))
    run.fit(Classifier(), DataLoader(data, 4))
    assert run.global_step == 2 + 4
    sampler = UnevenDistributedSampler(data, 1, 0, shuffle=True)
    data.pop()
    assert sorted(sampler) == list(range(14))


@pytest.mark.parametrize(("limit", "steps"), [({"max_epochs": 2}, 10), ({"max_steps": 7}, 7)])
def test_a_limit_that_a_hook_sets(limit: dict[str, int], steps: int) -> None:
    run = trainer(max_epochs=4, callbacks=AtEpoch(1, lambda trainer, module: vars(trainer).update(limit)))
    run.fit(Classifier(), loader(50, 10))
    assert run.global_step == steps


def accumulates(rank: int, change: AtEpoch, ranks: int) -> Any:
    module = Classifier()
    run = trainer(max_epochs=2, callbacks=change, accumulate_grad_batches=3)
    run.fit(module, loader(50, 6 // ranks))
    return flat_state(module.state_dict(), [run.global_step])


def set_window(trainer: Trainer, module: Any) -> None:
    trainer.accumulate_grad_batches = 2


def test_accumulation_changes_with_the_epoch(pool: Pool) -> None:
    expected = accumulates(0, AtEpoch(1, set_window), 1)
    assert_same(accumulates(0, AtEpoch(0, set_window, index=4), 1), expected)
    for state in pool.run(accumulates, AtEpoch(1, set_window), 2, ranks=2):
        assert_same(state, expected, TOLERANCE)


def test_callbacks_that_are_added_between_fits(tmp_path: Any) -> None:
    run, module = trainer(callbacks=ModelCheckpoint(tmp_path)), Classifier()
    run.callbacks.append(Callback())
    run.fit(module, loader(12))
    assert [type(callback) for callback in run.callbacks] == [Callback, ModelCheckpoint]
    run.callbacks.append(Callback())
    with pytest.raises(ValueError, match="same state_key"):
        run.fit(module, loader(12))


def test_a_fit_that_fails_counts_nothing() -> None:
    run = trainer(max_epochs=2, callbacks=AtEpoch(1, lambda trainer, module: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        run.fit(Classifier(), loader(12))
    assert (run.global_step, run.current_epoch) == (0, 0)


class Decays(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}


def decays(*epochs: int) -> dict[str, torch.Tensor]:
    module, run = Decays(), trainer()
    for run.max_epochs in epochs:
        run.fit(module, loader(12))
    return flat_state(module.state_dict())


def test_a_scheduler_goes_on_in_the_next_fit() -> None:
    assert_same(decays(1, 4), decays(4))


class Sees(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen += batch[0].tolist()
        return super().training_step(batch, batch_idx)


def resizes(rank: int, sizes: tuple[int, int]) -> list[Any]:
    module, run = Sees(), trainer(seed=0)
    for run.max_steps, size in zip((2, 100), sizes, strict=True):
        run.fit(module, loader(50, size, shuffle=True))
    return module.seen


@pytest.mark.parametrize("sizes", [(4, 6), (6, 4), (4, 4)])
def test_a_fit_goes_on_with_another_batch_size(pool: Pool, sizes: tuple[int, int]) -> None:
    seen = [sample for part in pool.run(resizes, sizes, ranks=3) for sample in part]
    assert sorted(seen) == sorted(dataset().tensors[0].tolist())


def test_a_shuffled_fit_without_a_seed_goes_on_in_its_order(tmp_path: Any) -> None:
    """It resumes in the second epoch, in a process whose generator is in another state."""

    def fit(state: int, steps: int, path: Any = None) -> tuple[list[Any], Any]:
        module = Sees()
        torch.manual_seed(state)
        keeper = ModelCheckpoint(tmp_path)
        Trainer(max_steps=steps, callbacks=keeper).fit(module, loader(40, 4, shuffle=True), ckpt_path=path)
        return module.seen, keeper.best_model_path

    whole, _ = fit(1, 17)
    begun, path = fit(1, 13)
    assert begun + fit(2, 17, path)[0] == whole != fit(2, 17)[0]


def test_another_module_has_no_report_yet() -> None:
    run = trainer()
    run.fit(Classifier(), loader(12))
    assert run.join_report is not None
    with pytest.raises(ZeroDivisionError):
        run.fit(Broken(), loader(12))
    assert run.join_report is None


class Broken(Classifier):
    def configure_optimizers(self) -> Any:
        raise ZeroDivisionError

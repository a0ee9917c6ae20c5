"""Validation and test on uneven loaders, and what modules log: dummies count nothing."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightning", reason="needs the extra lightning: make test-frameworks")

import lightning.pytorch as pl  # pyright: ignore[reportMissingImports]
import torch
import torchmetrics
from torch import nn

from tests.ending import Ending
from tests.integrations.lightning.training import Case, Module, batch, loader_of, quiet, trainer_of

STEP, EPOCH = {"on_step": True, "on_epoch": False}, {"on_step": False, "on_epoch": True}


class Logging(Module):
    """Logs whatever one may log."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.error, self.listed = torchmetrics.MeanSquaredError(), torchmetrics.CatMetric()
        self.at_steps: list[dict[str, float]] = []
        self.sizes: list[int] = []

    def training_step(self, data: Any, index: int) -> torch.Tensor:
        x, y = data
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log("largest", y.max() if len(y) else torch.tensor(0.0), **STEP, reduce_fx="max", sync_dist=True)
        self.log("count", float(len(x)), **EPOCH, reduce_fx="sum", sync_dist=True)
        self.log("own", y.mean(), **STEP)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.at_steps.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    def validation_step(self, data: Any, index: int, dataloader_idx: int = 0) -> None:
        x, y = data
        self.sizes.append(len(x))
        out = self.net(x)
        self.log("val_loss", nn.functional.mse_loss(out, y), sync_dist=True)
        self.log("largest_out", y.max() if len(y) else torch.tensor(0.0), reduce_fx="max", sync_dist=True)
        self.error(out, y)
        self.log("val_error", self.error)
        if len(x):
            self.listed.update(y)

    def on_validation_epoch_end(self) -> None:
        self.log("val_samples", float(self.listed.compute().numel()))
        self.listed.reset()

    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, data: Any, index: int) -> torch.Tensor:
        return self.net(data[0])


def loss_of(net: nn.Module, data: list[Any]) -> float:
    x, y = (torch.cat(each) for each in zip(*data, strict=True))
    return nn.functional.mse_loss(net(x), y).item()


def log_training(rank: int, case: Case) -> tuple[list[dict[str, float]], dict[str, float]]:
    quiet(rank)
    module = Logging(case)
    trainer = trainer_of(case)
    trainer.fit(module, loader_of("stream", rank, case.counts[rank]))
    return module.at_steps, {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_what_training_logs(ending: Ending) -> None:
    case = Case(counts=(1, 3), epochs=1)
    (first, end), (second, end_too) = ending.run(log_training, case, ranks=2)
    global_batches = [[batch(rank, step) for rank in (0, 1) if step < case.counts[rank]] for step in range(3)]
    for at, data in enumerate(global_batches):
        for name in ("loss", "largest"):
            assert first[at][name] == second[at][name]
        assert first[at]["largest"] == pytest.approx(max(y.max().item() for _, y in data))
    # A dummy leaves alone what is not reduced.
    assert [step["own"] for step in first] == [pytest.approx(batch(0, 0)[1].mean().item())] * 3
    net = Module(case).net
    assert first[0]["loss_step"] == pytest.approx(loss_of(net, global_batches[0]))
    sizes = [sum(len(x) for x, _ in data) for data in global_batches]
    expected = sum(step["loss_step"] * size for step, size in zip(first, sizes, strict=True)) / sum(sizes)
    assert end["loss_epoch"] == end_too["loss_epoch"] == pytest.approx(expected)
    assert end["count"] == end_too["count"] == sum(sizes)


def evaluate(rank: int, counts: list[tuple[int, int]], kind: str, how: str) -> tuple[list[Any], list[int]]:
    quiet(rank)
    module = Logging(Case())
    loaders = [loader_of(kind, rank, each[rank]) for each in counts]
    trainer = trainer_of(Case())
    run = getattr(trainer, how)
    return run(module, loaders if len(loaders) > 1 else loaders[0], verbose=False), module.sizes


@pytest.mark.parametrize("kind", ["stream", "sized"])
@pytest.mark.parametrize("how", ["validate", "test"])
@pytest.mark.parametrize("counts", [[(3, 1)], [(0, 2)], [(1, 3), (2, 0)]], ids=str)
def test_as_one_process(ending: Ending, counts: list[tuple[int, int]], kind: str, how: str) -> None:
    ranks = ending.run(evaluate, counts, kind, how, ranks=2)
    net = Module(Case()).net
    for found, sizes in ranks:
        assert len(sizes) == sum(map(max, counts))
        for number, each in enumerate(counts):
            data = [batch(rank, step) for rank in (0, 1) for step in range(each[rank])]
            suffix = f"/dataloader_idx_{number}" if len(counts) > 1 else ""
            assert found[number]["val_loss" + suffix] == pytest.approx(loss_of(net, data))
            assert found[number]["largest_out" + suffix] == pytest.approx(max(y.max().item() for _, y in data))
            if len(counts) == 1:
                assert found[number]["val_error"] == pytest.approx(loss_of(net, data))
        assert found[0]["val_samples"] == sum(
            len(batch(rank, step)[0]) for each in counts for rank in (0, 1) for step in range(each[rank])
        )


def predict(rank: int, counts: tuple[int, int]) -> list[torch.Tensor]:
    quiet(rank)
    return trainer_of(Case()).predict(Logging(Case()), loader_of("sized", rank, counts[rank]))


def test_predictions_are_those_of_each_rank(ending: Ending) -> None:
    net, counts = Module(Case()).net, (2, 0)
    for rank, found in enumerate(ending.run(predict, counts, ranks=2)):
        expected = [net(batch(rank, step)[0]).detach() for step in range(counts[rank])]
        torch.testing.assert_close(found or [], expected)


def stop_early(rank: int) -> tuple[int, int, float]:
    quiet(rank)
    case = Case(epochs=6, counts=(0, 2))
    stops = pl.callbacks.EarlyStopping("val_loss", patience=0, min_delta=1e9)
    trainer = trainer_of(case, callbacks=[stops], num_sanity_val_steps=2, enable_progress_bar=True)
    trainer.fit(Logging(case), loader_of("sized", rank, case.counts[rank]), loader_of("sized", rank, 2 * rank))
    return trainer.current_epoch, trainer.global_step, float(trainer.callback_metrics["val_loss"])


def test_early_stopping_with_a_progress_bar(ending: Ending) -> None:
    first, second = ending.run(stop_early, ranks=2)
    assert first == second
    assert first[:2] == (2, 4)


class Bounded(Module):
    """Has a metric that wraps another one."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.bounds = torchmetrics.MinMaxMetric(torchmetrics.MeanMetric())

    def validation_step(self, data: Any, index: int) -> None:
        self.bounds(data[0].mean())

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.bounds.compute())


def bound(rank: int, counts: tuple[int, int]) -> dict[str, float]:
    quiet(rank)
    (found,) = trainer_of(Case()).validate(Bounded(Case()), loader_of("stream", rank, counts[rank]))
    return found


def test_a_wrapper_of_a_metric(ending: Ending) -> None:
    counts = (3, 1)
    means = [float(batch(rank, step)[0].mean()) for rank in (0, 1) for step in range(counts[rank])]
    for found in ending.run(bound, counts, ranks=2):
        assert (found["min"], found["max"]) == pytest.approx((min(means), max(means)))

"""Steps that look at their losses, leave batches out, or gather: right on dummies, or an error in seconds."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightning", reason="needs the extra lightning: make test-frameworks")

import lightning.pytorch as pl  # pyright: ignore[reportMissingImports]
import torch
from lightning.pytorch.utilities import CombinedLoader  # pyright: ignore[reportMissingImports]
from torch import nn

from joinables.integrations.lightning import JoinStrategy
from joinables.integrations.lightning.names import LOOPS
from tests.ending import Ending
from tests.harness import assert_soon
from tests.integrations.lightning.training import (
    FEATURES,
    Case,
    Module,
    Sized,
    batch,
    build,
    flat,
    in_one_process,
    loader_of,
    optimizers_of,
    quiet,
    trainer_of,
)
from tests.sync_norm import sync_batch_norm_on_cpu

COUNTS = [(4, 2), (0, 3)]


class Guarded(Module):
    """Does not train on what is not finite; by hand if it is told so."""

    def __init__(self, case: Case, *, manual: bool) -> None:
        super().__init__(case)
        self.automatic_optimization = not manual

    def training_step(self, data: Any, index: int) -> Any:
        loss = super().training_step(data, index)
        if not torch.isfinite(loss):
            if self.automatic_optimization:
                raise ValueError("the loss is not finite")
            return None
        if not self.automatic_optimization:
            optimizer, scheduler = self.optimizers(), self.lr_schedulers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            scheduler.step()
        return loss

    def validation_step(self, data: Any, index: int) -> None:
        loss = nn.functional.mse_loss(self.net(data[0]), data[1])
        if not torch.isfinite(loss):
            raise ValueError("the loss is not finite")
        self.log("val", loss, sync_dist=True)


def train_guarded(rank: int, case: Case, manual: bool) -> tuple[list[torch.Tensor], float]:
    quiet(rank)
    module = Guarded(case, manual=manual)
    loaders = [loader_of("stream", rank, counts[rank]) for counts in (case.counts, (2, 0))]
    trainer_of(case).fit(module, *loaders)
    return module.state(), float(module.trainer.callback_metrics["val"])


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_a_guard_against_nan_meets_none(ending: Ending, counts: tuple[int, int], manual: bool) -> None:
    case = Case(counts=counts, epochs=1)
    expected, net = in_one_process(case), build(case)
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), expected, strict=False):
            parameter.copy_(value)
    x, y = (torch.cat(parts) for parts in zip(*(batch(0, step) for step in range(2)), strict=True))
    for state, loss in ending.run(train_guarded, case, manual, ranks=2):
        torch.testing.assert_close(state, expected, rtol=1e-4, atol=2e-6)
        assert loss == pytest.approx(nn.functional.mse_loss(net(x), y).item(), rel=1e-4)


# -- leaving a batch out ----------------------------------------------------------------------------------------------


class LeavesOut(Module):
    """Learns nothing from the second batch of some ranks."""

    def __init__(self, case: Case, how: str, who: tuple[int, ...]) -> None:
        super().__init__(case)
        self.how, self.who, self.automatic_optimization = how, who, how != "manual"
        self.frozen = nn.Linear(FEATURES, 1).requires_grad_(False)

    def training_step(self, data: Any, index: int) -> Any:
        loss = super().training_step(data, index)
        if index == 1 and self.trainer.global_rank in self.who:
            if self.how == "a leaf":
                return torch.tensor(0.0, requires_grad=True)
            if self.how == "a frozen branch":
                return self.frozen(data[0].clone().requires_grad_()).mean()
            if self.how in ("none", "manual"):
                return None
        if self.how == "manual":
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def leave_out(rank: int, how: str, who: tuple[int, ...], weigh: Any) -> list[torch.Tensor]:
    quiet(rank)
    case = Case(counts=(3, 2), epochs=1)
    module = LeavesOut(case, how, who)
    trainer_of(case, strategy=JoinStrategy(weigh=weigh)).fit(module, loader_of("stream", rank, case.counts[rank]))
    return [each.detach().clone() for each in module.net.parameters()]


def left_out(who: tuple[int, ...], *, counts: bool) -> list[torch.Tensor]:
    """The same in one process; ``counts``: whether the batch that nothing is learnt from is in the mean."""
    net = build(Case())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        ranks = [rank for rank in (0, 1) if step < (3, 2)[rank]]
        learnt = [rank for rank in ranks if step != 1 or rank not in who]
        total = sum(len(batch(rank, step)[0]) for rank in (ranks if counts else learnt))
        optimizer.zero_grad()
        for x, y in (batch(rank, step) for rank in learnt):
            (nn.functional.mse_loss(net(x), y) * len(x) / total).backward()
        optimizer.step()
    return [each.detach() for each in net.parameters()]


@pytest.mark.parametrize("who", [(1,), (0, 1)], ids=str)
@pytest.mark.parametrize("how", ["a leaf", "a frozen branch"])
def test_a_loss_that_reaches_no_parameter_counts_as_0(ending: Ending, how: str, who: tuple[int, ...]) -> None:
    for state in ending.run(leave_out, how, who, "samples", ranks=2):
        torch.testing.assert_close(state, left_out(who, counts=True), rtol=1e-4, atol=2e-6)


def but_the_second(data: Any) -> float:
    """Weighs the second batch of each rank 0."""
    return 0.0 if any(torch.equal(data[0], batch(rank, 1)[0]) for rank in (0, 1)) else float(len(data[0]))


def test_a_batch_that_all_ranks_weigh_0(ending: Ending) -> None:
    for state in ending.run(leave_out, "", (), but_the_second, ranks=2):
        torch.testing.assert_close(state, left_out((0, 1), counts=False), rtol=1e-4, atol=2e-6)


def test_a_backward_that_all_ranks_leave_out(ending: Ending) -> None:
    for state in ending.run(leave_out, "manual", (0, 1), "samples", ranks=2):
        torch.testing.assert_close(state, left_out((0, 1), counts=False), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("how", ["manual", "none"])
def test_a_backward_that_one_rank_leaves_out(ending: Ending, how: str) -> None:
    ends = ending.ends(leave_out, how, (1,), "samples", ranks=2)
    assert all(end.code for end in ends)
    assert_soon(abs(ends[0].at - ends[1].at), 10)
    manual = "ProtocolError: Rank 1 skipped the backward of"
    own = {"manual": manual, "none": "RuntimeError: Skipping the `training_step`"}
    assert ends[1].error.startswith(own[how]), ends[1].error
    assert ends[0].error.startswith(f"PeerError: rank 1 failed: {own[how]}"), ends[0].error
    for end in ends:
        assert "return 0 for it from the function in JoinStrategy(weigh=function)" in end.error, end.error


# -- collectives of a step --------------------------------------------------------------------------------------------


class Gathers(Module):
    def training_step(self, data: Any, index: int) -> Any:
        loss = super().training_step(data, index)
        mean = self.trainer.strategy.reduce(loss.detach())
        assert self.trainer.strategy.reduce(torch.ones(()), reduce_op="sum") == 1  # as of the rank with data
        if index:
            with pytest.raises(TypeError, match=r"self\.all_gather in a step would return rows of dummies"):
                self.all_gather(mean)
        else:
            self.mean = mean
        return loss

    def on_train_epoch_end(self) -> None:
        assert self.all_gather(torch.tensor(self.trainer.global_rank)).tolist() == [0, 1]


def gather(rank: int) -> float:
    quiet(rank)
    module = Gathers(Case())
    trainer_of(Case(epochs=1)).fit(module, loader_of("stream", rank, (0, 2)[rank]))
    return float(module.mean)


def test_what_a_step_gathers(ending: Ending) -> None:
    x, y = batch(1, 0)
    expected = nn.functional.mse_loss(build(Case())(x), y).item()
    assert ending.run(gather, ranks=2) == [pytest.approx(expected)] * 2


def train_synchronised(rank: int) -> None:
    quiet(rank)
    case, fix = Case(norm=True), r"contains SyncBatchNorm.* Pass Trainer\(sync_batchnorm=False\)\. \[J104\]"
    with sync_batch_norm_on_cpu(), pytest.raises(ValueError, match=fix):
        trainer_of(case, sync_batchnorm=True).fit(Module(case), loader_of("stream", rank, 1))


def test_synchronised_norms_are_refused(ending: Ending) -> None:
    ending.run(train_synchronised, ranks=2)


# -- several loaders --------------------------------------------------------------------------------------------------


class Pairs(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.steps, self.validated = build(Case()), 0, 0

    def training_step(self, data: Any, index: int) -> torch.Tensor:
        self.steps += 1
        parts = [part for part in data.values() if part is not None] if isinstance(data, dict) else [data]
        return torch.stack([nn.functional.mse_loss(self.net(x), y) for x, y in parts]).mean()

    def validation_step(self, data: Any, index: int) -> None:
        self.validated += 1

    def configure_optimizers(self) -> Any:
        return optimizers_of(self.net)[0]


def combine(rank: int, mode: str) -> tuple[int, int, list[torch.Tensor]]:
    quiet(rank)
    module, sizes = Pairs(), [(3, 1), (1, 3)][rank]
    loaders = CombinedLoader({name: Sized(rank, size) for name, size in zip("ab", sizes, strict=True)}, mode)
    trainer_of(Case(epochs=2)).fit(module, loaders, Sized(rank, 1))
    return module.steps, module.validated, flat(module.net, module.trainer.optimizers[0])


@pytest.mark.parametrize(("mode", "steps"), [("min_size", 1), ("max_size", 3), ("max_size_cycle", 3)])
def test_several_loaders_end_as_long_as_they_are(ending: Ending, mode: str, steps: int) -> None:
    first, second = ending.run(combine, mode, ranks=2)
    assert first[:2] == second[:2] == (2 * steps, 2)
    torch.testing.assert_close(first[2], second[2])


def test_lightning_is_put_back(ending: Ending) -> None:
    for before, during, after in ending.run(look_at_places, ranks=2):
        assert before == after != during


def look_at_places(rank: int) -> list[list[str]]:
    quiet(rank)
    found = [[loop._select_data_fetcher.__module__ for loop in LOOPS]]

    class Looks(Module):
        def on_train_epoch_start(self) -> None:
            found.append([loop._select_data_fetcher.__module__ for loop in LOOPS])

    trainer_of(Case(epochs=1)).fit(Looks(Case()), loader_of("stream", rank, rank))
    return [*found, [loop._select_data_fetcher.__module__ for loop in LOOPS]]

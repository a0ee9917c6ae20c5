"""A fit on several processes equals one process: weights, optimizer state and metrics; and so does one that goes on."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from join import JoinError
from joinables.trainer import Callback, ModelCheckpoint, TrainModule
from joinables.trainer.strategy import sharded
from tests.ending import Ending
from tests.harness import ALL, Parts, Pool, all_or_each, in_test_all, parts_in
from tests.joinables.trainer.modules import Classifier, dataset, loader
from tests.joinables.trainer.ranks import new_group, trainer
from tests.meeting import tell, wait_for
from tests.training import TOLERANCE, assert_same, flat_state

GLOBAL_BATCH = 12


@dataclass(frozen=True)
class Case:
    """One way to fit."""

    samples: int = 50
    epochs: int = 3 if ALL else 2
    options: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    module: dict[str, Any] = field(default_factory=dict)


CASES = {
    "uneven": Case(),
    "even": Case(samples=48),
    "a rank without data": Case(samples=3),
    "most ranks without data in the last step": Case(samples=49),
    "clipping": Case(module={"optimizer": "adamw", "clip": 0.1}),
    "accumulation": Case(options={"accumulate_grad_batches": 2}),
    "accumulation, sharded": Case(options={"accumulate_grad_batches": 3}, strategy={"shard_optimizers": True}),
    "sharded, clipping": Case(module={"clip": 0.1}, strategy={"shard_optimizers": True}),
    "sharded, scheduler of steps": Case(strategy={"shard_optimizers": True}, module={"scheduler": "step"}),
    "scheduler of steps": Case(module={"scheduler": "step"}),
    "max_steps": Case(options={"max_steps": 7}, epochs=10),
    "find_unused_parameters": Case(strategy={"find_unused_parameters": True}),
}


def fit(rank: int, case: Case, ranks: int) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    run = trainer(strategy=case.strategy, max_epochs=case.epochs, seed=1, **case.options)
    module = Classifier(**case.module)
    size = GLOBAL_BATCH // ranks
    run.fit(module, loader(case.samples, size, shuffle=True), loader(29, size))
    state = flat_state(module.state_dict(), [run.global_step, run.current_epoch])
    return state, run.callback_metrics


def parts_of(name: str) -> Parts:
    return parts_in(CASES[name])


@pytest.mark.parametrize("name", all_or_each(CASES, parts_of))
def test_equals_one_process(pool: Pool, name: str) -> None:
    case = CASES[name]
    single, single_metrics = fit(0, case, 1)
    for ranks in (2, 3) if ALL else (3,):
        results = pool.run(fit, case, ranks, ranks=ranks)
        for state, metrics in results:
            assert_same(state, results[0][0])
            assert_same(state, single, TOLERANCE)
            assert metrics == results[0][1]
            assert metrics == pytest.approx(single_metrics, abs=TOLERANCE)


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_equals_a_loop_by_hand(interval: str) -> None:
    """Windows of two batches, a last one of one, clipping, and a scheduler."""
    module, reference = Classifier(optimizer="sgd", scheduler=interval, clip=0.1), Classifier(optimizer="sgd")
    run = trainer(max_epochs=2, accumulate_grad_batches=2)
    run.fit(module, loader(50))
    configured, batches = reference.configure_optimizers(), list(loader(50))
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    for index in range(10):
        window = batches[index % 5 * 2 :][:2]
        optimizer.zero_grad()
        x, y = (torch.cat(parts) for parts in zip(*window, strict=True))
        nn.functional.cross_entropy(reference(x), y).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        optimizer.step()
        if interval == "step" or index % 5 == 4:
            scheduler.step()
    assert_same(flat_state(module.state_dict()), flat_state(reference.state_dict()), TOLERANCE)


def evaluate(rank: int, size: int) -> tuple[dict[str, float], dict[str, float], list[torch.Tensor]]:
    run = trainer()
    module = Classifier()
    data = loader(29, size, shuffle=True)
    return run.validate(module, data)[0], run.test(module, data)[0], run.predict(module, data)


def test_evaluation_equals_one_process_exactly(pool: Pool) -> None:
    """Ranks have the batches of one process, and sums do not depend on their order: not a bit differs."""
    single = evaluate(0, 4)
    for ranks in (2, 3):
        for rank, (validated, tested, predicted) in enumerate(pool.run(evaluate, 4, ranks=ranks)):
            assert validated == single[0]
            assert tested == single[1]
            assert_same(flat_state(predicted), flat_state(single[2] if rank == 0 else []))
    expected = [Classifier()(part).detach() for part in dataset(29).tensors[0].split(4)]
    assert_same(flat_state(single[2]), flat_state(expected))


def more_ranks_than_batches(rank: int) -> tuple[dict[str, float], int]:
    run = trainer()
    return run.validate(Classifier(), loader(5, 4))[0], sum(map(len, run.predict(Classifier(), loader(5, 4))))


def test_evaluation_with_a_rank_without_data(pool: Pool) -> None:
    expected = more_ranks_than_batches(0)
    assert pool.run(more_ranks_than_batches, ranks=3) == [expected, *[(expected[0], 0)] * 2]


# -- going on ---------------------------------------------------------------------------------------------------------


def in_parts(rank: int, parts: list[dict[str, int]], strategy: dict[str, Any], evaluate: bool) -> Any:
    """Fit as often as there are parts, raising a limit each time."""
    run = trainer(strategy=strategy, seed=3, accumulate_grad_batches=2)
    module = Classifier(dropout=0.3)
    for part in parts:
        run.max_epochs, run.max_steps = part.get("max_epochs", 100), part.get("max_steps")
        run.fit(module, loader(50, 4, shuffle=True), loader(20, 4))
        if evaluate:
            run.test(module, loader(20, 4))
            run.predict(module, loader(20, 4))
    return flat_state(module.state_dict(), [run.global_step, run.current_epoch]), run.callback_metrics.get("train_loss")


LIMITS = {
    "epochs": [{"max_epochs": 1}, {"max_epochs": 3}],
    "steps": [{"max_steps": 2}, {"max_steps": 3}, {"max_steps": 7}],
}


@pytest.mark.parametrize(("limits", "shard"), all_or_each(product(LIMITS, [False, True])))
def test_a_second_fit_goes_on_bit_for_bit(pool: Pool, limits: str, shard: bool) -> None:
    strategy = {"shard_optimizers": shard}
    interrupted = pool.run(in_parts, LIMITS[limits], strategy, True, ranks=2)
    whole = pool.run(in_parts, LIMITS[limits][-1:], strategy, False, ranks=2)
    for (state, loss), (expected, expected_loss) in zip(interrupted, whole, strict=True):
        assert_same(state, expected)
        assert loss == expected_loss


def test_a_fit_without_a_step_keeps_the_place_in_the_epoch() -> None:
    state, loss = in_parts(0, [{"max_steps": 2}, {"max_steps": 2}, {"max_steps": 7}], {}, False)
    expected, expected_loss = in_parts(0, [{"max_steps": 7}], {}, False)
    assert_same(state, expected)
    assert loss == expected_loss


def test_workers_that_persist_draw_the_same_over_two_fits() -> None:
    """A second fit starts them anew, and that draws a seed."""

    def state(*epochs: int) -> dict[str, torch.Tensor]:
        run, module = trainer(seed=3), Classifier(dropout=0.3)
        for run.max_epochs in epochs:
            data = [loader(20, 4, shuffle=shuffle, num_workers=1, persistent_workers=True) for shuffle in (True, False)]
            run.fit(module, *data)  # pyright: ignore[reportArgumentType]
        return flat_state(module.state_dict())

    assert_same(state(1, 2), state(2))


class Interrupt(Exception):
    """What ends a fit from within."""


class Interrupting(Callback):
    """Raises after some steps."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.after:
            raise Interrupt


def augmented(rows: Any) -> Any:
    """Batches that depend on random numbers of the process that trains."""
    x, y = torch.utils.data.default_collate(rows)
    return x + 0.1 * torch.randn_like(x), y


def resumed(rank: int, folder: str, samples: int, every: int, fail_at: int | None, shard: bool) -> Any:
    """Fit with checkpoints, from the last one if there is one; with ``fail_at``, fail there."""
    callbacks: list[Callback] = [ModelCheckpoint(folder, save_last=True, save_top_k=0, every_n_train_steps=every)]
    if fail_at is not None:
        callbacks.append(Interrupting(fail_at))
    run = trainer(strategy={"shard_optimizers": shard}, seed=3, max_epochs=3, callbacks=callbacks)
    module, last = Classifier(dropout=0.3), Path(folder) / "last.ckpt"
    data = loader(samples, 4, shuffle=True, collate_fn=augmented), loader(20, 4)
    with nullcontext() if fail_at is None else pytest.raises(Interrupt):
        run.fit(module, *data, ckpt_path=last if last.exists() else None)
    return flat_state(module.state_dict(), [run.global_step, run.current_epoch]), run.callback_metrics.get("train_loss")


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize(
    ("samples", "every", "fail_at"),
    [pytest.param(50, 2, 5, id="all have data", marks=in_test_all), pytest.param(9, 1, 5, id="one has none")],
)
def test_resume_in_the_middle_of_an_epoch(
    pool: Pool, tmp_path: Path, shard: bool, samples: int, every: int, fail_at: int
) -> None:
    """With 9 samples, the checkpoint is of a step that only rank 0 takes part in."""
    whole = pool.run(resumed, str(tmp_path / "whole"), samples, every, None, shard, ranks=2)
    pool.run(resumed, str(tmp_path / "interrupted"), samples, every, fail_at, shard, ranks=2)
    interrupted = pool.run(resumed, str(tmp_path / "interrupted"), samples, every, None, shard, ranks=2)
    for (state, loss), (expected, expected_loss) in zip(interrupted, whole, strict=True):
        assert_same(state, expected)
        assert loss == expected_loss


class SavesAt(Callback):
    """Writes a checkpoint in a hook, each time over the one before, and raises in the second epoch's."""

    def __init__(self, hook: str, path: str, fails: bool) -> None:
        self.path, self.fails = path, fails
        setattr(self, hook, self.save)

    def save(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(self.path)
        if self.fails and trainer.current_epoch == 1:
            raise Interrupt


class DrawsInHooks(Classifier):
    def on_train_epoch_start(self) -> None:
        self.log("start_noise", torch.rand(()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_noise", torch.rand(()))


def resumed_from_hook(rank: int, hook: str, folder: str, fails: bool) -> Any:
    path = Path(folder) / "file.ckpt"

    def fit(fails: bool, **options: Any) -> Any:
        run, module = trainer(seed=3, max_epochs=3, callbacks=SavesAt(hook, str(path), fails)), DrawsInHooks(0.3)
        run.fit(module, loader(18, 4, shuffle=True, collate_fn=augmented), loader(20, 4), **options)
        return flat_state(module.state_dict(), [run.global_step, run.current_epoch]), run.callback_metrics

    if not fails:
        return fit(False)
    with pytest.raises(Interrupt):
        fit(True)
    new_group()
    return fit(False, ckpt_path=path)


HOOKS = (
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_epoch_end",
    "on_train_epoch_end",
)


@pytest.mark.parametrize("hook", HOOKS)
def test_going_on_from_a_checkpoint_of_any_hook(tmp_path: Path, hook: str) -> None:
    state, metrics = resumed_from_hook(0, hook, str(tmp_path), True)
    expected, expected_metrics = resumed_from_hook(0, hook, str(tmp_path), False)
    assert_same(state, expected)
    assert metrics == expected_metrics


def test_going_on_from_between_training_and_validation(pool: Pool, tmp_path: Path) -> None:
    interrupted = pool.run(resumed_from_hook, "on_validation_epoch_end", str(tmp_path), True, ranks=2)
    whole = pool.run(resumed_from_hook, "on_validation_epoch_end", str(tmp_path), False, ranks=2)
    for (state, metrics), (expected, expected_metrics) in zip(interrupted, whole, strict=True):
        assert_same(state, expected)
        assert metrics == expected_metrics


# -- other data, other loops ------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    """Batches of unknown number: rank r has ``counts[r]``."""

    def __init__(self, counts: tuple[int, ...]) -> None:
        self.counts = counts

    def __iter__(self) -> Any:
        rank = torch.distributed.get_rank()
        for index in range(self.counts[rank]):
            generator = torch.Generator().manual_seed(100 * rank + index)
            size = 2 + (rank + index) % 3
            yield torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator)


def stream(rank: int, counts: tuple[int, ...]) -> Any:
    run, module = trainer(max_epochs=2), Classifier()
    run.fit(module, torch.utils.data.DataLoader(Stream(counts), batch_size=None))
    return flat_state(module.state_dict()), run.global_step, run.callback_metrics


def test_streams_of_unknown_length(pool: Pool) -> None:
    counts = (2, 0, 4)
    results = pool.run(stream, counts, ranks=3)
    module = Classifier()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    losses: list[float] = []
    for epoch in range(2):
        optimizer.param_groups[0]["lr"] = 0.02 * 0.9**epoch
        losses, total = [], 0
        for step in range(4):
            batches = []
            for rank, count in enumerate(counts):
                if step < count:
                    generator = torch.Generator().manual_seed(100 * rank + step)
                    size = 2 + (rank + step) % 3
                    x = torch.randn(size, 6, generator=generator)
                    batches.append((x, torch.randint(3, (size,), generator=generator)))
            x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(module.body(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item() * len(x))
            total += len(x)
    for state, steps, metrics in results:
        assert steps == 8
        assert_same(state, flat_state(module.state_dict()), TOLERANCE)
        assert metrics["train_loss"] == pytest.approx(sum(losses) / total, abs=TOLERANCE)


class LearnsNothing(Classifier):
    """Its loss reaches no parameter in the first step of rank 2, which has data until then; its frozen part is used."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 1).requires_grad_(False)

    def training_step(self, batch: Any, index: int) -> Any:
        if index or torch.distributed.get_rank() != 2:
            return super().training_step(batch, index)
        return self.frozen(batch[0].clone().requires_grad_()).mean()


def learn_nothing(rank: int, counts: tuple[int, ...]) -> Any:
    run = trainer(max_epochs=1)
    module = LearnsNothing()
    run.fit(module, torch.utils.data.DataLoader(Stream(counts), batch_size=None))
    return flat_state(module.body.state_dict())


def test_a_loss_that_reaches_no_parameter_counts_as_0(pool: Pool) -> None:
    counts = (2, 0, 1)
    module = Classifier()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    for step in range(2):
        batches: list[Any] = []
        for rank in (rank for rank, count in enumerate(counts) if step < count):
            generator = torch.Generator().manual_seed(100 * rank + step)
            size = 2 + (rank + step) % 3
            x = torch.randn(size, 6, generator=generator)
            batches.append((x, torch.randint(3, (size,), generator=generator)))
        x, y = batches[0]  # the other one is in the mean, and has gradients of 0
        optimizer.zero_grad()
        (nn.functional.cross_entropy(module.body(x), y) * len(x) / sum(len(x) for x, _ in batches)).backward()
        optimizer.step()
    for state in pool.run(learn_nothing, counts, ranks=3):
        assert_same(state, flat_state(module.body.state_dict()), TOLERANCE)


class Gan(TrainModule):
    """Manual optimization: two updates of the critic for one of the generator."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        g_opt, c_opt = self.optimizers()
        noise = x[:, :3]
        for _ in range(2):
            c_opt.zero_grad()
            c_loss = (self.critic(self.generator(noise).detach()) - self.critic(x)).tanh().mean()
            self.manual_backward(c_loss)
            c_opt.step()
        g_opt.zero_grad()
        g_loss = -self.critic(self.generator(noise)).tanh().mean()
        self.manual_backward(g_loss)
        g_opt.step()
        self.log("g_loss", g_loss)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.generator.parameters(), 0.01), torch.optim.SGD(self.critic.parameters(), 0.05)]


def gan(rank: int, ranks: int) -> Any:
    run = trainer(max_epochs=2, seed=0)
    module = Gan()
    run.fit(module, loader(50, GLOBAL_BATCH // ranks))
    return flat_state(module.state_dict()), run.global_step, run.callback_metrics["g_loss"]


def test_manual_optimization_equals_one_process(pool: Pool) -> None:
    expected, steps, loss = gan(0, 1)
    assert steps == 2 * 5 * 3
    for ranks in (2, 3):
        for state, count, value in pool.run(gan, ranks, ranks=ranks):
            assert count == steps
            assert value == pytest.approx(loss, abs=TOLERANCE)
            assert_same(state, expected, TOLERANCE)


class Familiar(TrainModule):
    """Written as for Lightning."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        x, y = batch
        loss = nn.functional.cross_entropy(self.layer(x), y)
        self.log("train_loss", loss)
        return {"loss": loss, "scores": x}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.layer(x), y))

    def on_validation_epoch_end(self) -> None:
        self.log("epochs", float(self.trainer.current_epoch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


def familiar(rank: int) -> tuple[float, float, float]:
    rates: list[float] = []

    class Rates(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            rates.append(module.optimizers().param_groups[0]["lr"])

    run = trainer(max_epochs=3, callbacks=[Rates()])
    run.fit(Familiar(), loader(50, 6), loader(29, 6))
    assert run.callback_metrics["epochs"] == 2.0
    return *rates[1:], run.callback_metrics["val_loss"]  # type: ignore[return-value]


def test_a_module_as_for_lightning(pool: Pool) -> None:
    results = pool.run(familiar, ranks=2)
    assert results[0] == results[1]
    assert results[0][:2] == pytest.approx((0.005, 0.0005))


class Normalised(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log("forwards", 1.0, reduce_fx="sum")
        return self.body(self.norm(x))


def normalised(rank: int, counts: tuple[int, ...]) -> Any:
    run, module = trainer(max_epochs=2), Normalised()
    run.fit(module, torch.utils.data.DataLoader(Stream(counts), batch_size=None))
    return flat_state(module.state_dict()), module.norm.num_batches_tracked.item(), module.norm.running_mean


@pytest.mark.parametrize("counts", [(0, 2, 4), (3, 0, 4), (1, 3, 2)])
def test_buffers_are_those_of_the_lowest_rank_with_data(pool: Pool, counts: tuple[int, ...]) -> None:
    """The leader of the step before may have run out: its buffers lack what this step's forward did."""
    norm = nn.BatchNorm1d(6)
    for _ in range(2):
        for step in range(max(counts)):
            rank = next(rank for rank, count in enumerate(counts) if count > step)
            generator = torch.Generator().manual_seed(100 * rank + step)
            norm(torch.randn(2 + (rank + step) % 3, 6, generator=generator))
    results = pool.run(normalised, counts, ranks=3)
    for state, tracked, mean in results:
        assert_same(state, results[0][0])
        assert tracked == 2 * max(counts)
        torch.testing.assert_close(mean, norm.running_mean, atol=TOLERANCE, rtol=0)


class Unfreezing(Callback):
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        module.body[0].requires_grad_(trainer.current_epoch > 0)


def unfreezes(rank: int, ranks: int, samples: int) -> dict[str, torch.Tensor]:
    module = Classifier(optimizer="sgd")
    trainer(max_epochs=3, callbacks=Unfreezing()).fit(module, loader(samples, GLOBAL_BATCH // ranks))
    return flat_state(module.state_dict())


@pytest.mark.parametrize("samples", [48, 50])
def test_freezing_in_the_middle_of_a_fit(pool: Pool, samples: int) -> None:
    for state in pool.run(unfreezes, 2, samples, ranks=2):
        assert_same(state, unfreezes(0, 1, samples), TOLERANCE)


def keeps(rank: int, folder: str, counts: tuple[int, ...] = (1, 4), **strategy: Any) -> tuple[str, str]:
    keeper = ModelCheckpoint(folder, every_n_train_steps=2, save_last=True)
    run = trainer(callbacks=keeper, strategy=strategy)
    run.fit(Classifier(), torch.utils.data.DataLoader(Stream(counts), batch_size=None))
    return keeper.best_model_path, keeper.last_model_path


class Modes(Classifier):
    """Counts how often which part was in training mode in a training step."""

    def __init__(self, frozen: str) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 3))
        for name, part in self.named_modules():
            if name in frozen.split():
                part.eval()
        self.seen: set[str] = set()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.add(" ".join(name or "all" for name, part in self.named_modules() if not part.training))
        return super().training_step(batch, batch_idx)


def modes(rank: int, frozen: str) -> Any:
    module = Modes(frozen)
    run = trainer(max_epochs=1)
    for run.max_epochs in (1, 2):
        run.fit(module, loader(50), loader(12))
    return module.seen, int(module.body[1].num_batches_tracked), [part.training for part in module.modules()]  # pyright: ignore[reportArgumentType]


def test_frozen_parts_stay_frozen(pool: Pool) -> None:
    for seen, batches, after in pool.run(modes, "body.1 body.2", ranks=2):
        assert (seen, batches) == ({"body.1 body.2"}, 0)
        assert after == [True, True, True, False, False, True]
    for module, count in ((Modes(""), 9), (Modes("").eval(), 9)):
        before = [part.training for part in module.modules()]
        trainer().fit(module, loader(50), loader(12))
        assert (module.seen, int(module.body[1].num_batches_tracked)) == ({""}, count)  # pyright: ignore[reportArgumentType]
        assert [part.training for part in module.modules()] == before


class FreezesInTrain(Modes):
    def train(self, mode: bool = True) -> FreezesInTrain:
        super().train(mode)
        self.body[1].eval()
        return self


def test_what_train_itself_freezes_stays_frozen() -> None:
    module = FreezesInTrain("body.2")
    trainer().fit(module, loader(50), loader(12))
    assert (module.seen, int(module.body[1].num_batches_tracked)) == ({"body.1 body.2"}, 0)  # pyright: ignore[reportArgumentType]


class Unfreezes(Classifier):
    """Gives the optimizer another group in the second epoch; if it ``remembers``, also where a later fit goes on."""

    def __init__(self, remembers: bool) -> None:
        super().__init__()
        self.body[0].requires_grad_(False)
        self.remembers = remembers

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.body[3].parameters(), lr=0.1, momentum=0.9)

    def on_train_epoch_start(self) -> None:
        if self.trainer.current_epoch == 1:
            self.unfreeze()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.remembers and checkpoint["epochs"] > 1:
            self.unfreeze()

    def unfreeze(self) -> None:
        self.body[0].requires_grad_(True)
        self.optimizers().add_param_group({"params": list(self.body[0].parameters())})


def adds_groups(rank: int, shard: bool) -> Any:
    states: list[Any] = []
    for epochs in ((2, 3), (3,)):
        module, run = Unfreezes(remembers=True), trainer(strategy={"shard_optimizers": shard})
        for run.max_epochs in epochs:
            run.fit(module, loader(30))
        states.append(flat_state(module.state_dict()))
    module, run = Unfreezes(remembers=False), trainer(strategy={"shard_optimizers": shard}, max_epochs=2)
    run.fit(module, loader(30))
    run.max_epochs = 3
    with pytest.raises(ValueError, match=r"has other optimizers or .* in on_load_checkpoint"):
        run.fit(module, loader(30))
    return states


@pytest.mark.parametrize("shard", [False, True], ids=["ddp", "zero"])
def test_groups_that_a_hook_adds(pool: Pool, shard: bool) -> None:
    for parts, whole in pool.run(adds_groups, shard, ranks=2):
        assert_same(parts, whole)


def steps_sharded(rank: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Parameters after a step of AdamW with groups and names, sharded and whole."""
    states: list[dict[str, torch.Tensor]] = []
    for shard in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        groups = [{"params": list(net[place].named_parameters()), "lr": lr} for place, lr in enumerate((0.1, 0.2))]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.5)
        net(torch.ones(1, 4)).sum().backward()
        (sharded(optimizer) if shard else optimizer).step()
        states.append(net.state_dict())
    return states[0], states[1]


def test_groups_with_names_are_sharded(pool: Pool) -> None:
    for shards, whole in pool.run(steps_sharded, ranks=2):
        assert_same(shards, whole)


class WarmsUp(Classifier):
    """Its first learning rate is not the optimizer's, and a scheduler holds others."""

    def configure_optimizers(self) -> Any:
        optimizer, kinds = torch.optim.SGD(self.parameters(), 0.1), torch.optim.lr_scheduler
        parts: list[Any] = [kinds.LinearLR(optimizer, 0.1, total_iters=4), kinds.ExponentialLR(optimizer, 0.9)]
        scheduler = kinds.SequentialLR(optimizer, parts, [6])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def warms_up(rank: int, ranks: int, epochs: tuple[int, ...]) -> dict[str, torch.Tensor]:
    module, run = WarmsUp(), trainer(strategy={"shard_optimizers": True})
    for run.max_epochs in epochs:
        run.fit(module, loader(30, GLOBAL_BATCH // ranks))  # the last step is of one rank
    return flat_state(module.state_dict())


def test_schedulers_of_sharded_optimizers(pool: Pool) -> None:
    for state in pool.run(warms_up, 2, (1, 3), ranks=2):
        assert_same(state, warms_up(0, 1, (3,)), TOLERANCE)


class WithLBFGS(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1)


class StepsLBFGS(WithLBFGS):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = self.shared_step(batch, "train")
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


def refuses_lbfgs(rank: int, kind: type[WithLBFGS], shard: bool) -> None:
    with pytest.raises(ValueError, match=r"LBFGS .* on each rank\. Pass devices=1"):
        trainer(strategy={"shard_optimizers": shard}).fit(kind(), loader(24))


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")  # LBFGS of torch 2.8 does
def test_an_optimizer_that_needs_a_closure(pool: Pool) -> None:
    with pytest.raises(TypeError, match="closure"):
        trainer().fit(WithLBFGS(), loader(24))
    pool.run(refuses_lbfgs, WithLBFGS, True, ranks=2)
    pool.run(refuses_lbfgs, StepsLBFGS, False, ranks=2)
    module, reference = StepsLBFGS(), Classifier()
    run = trainer()
    run.fit(module, loader(24))
    assert run.global_step == 4
    optimizer = torch.optim.LBFGS(reference.parameters(), lr=0.1)
    for x, y in loader(24):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(reference(x), y)  # noqa: B023
            loss.backward()
            return loss

        optimizer.step(closure)
    assert_same(flat_state(module.state_dict()), flat_state(reference.state_dict()), TOLERANCE)


def test_callbacks_of_a_rank_that_ran_out(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(keeps, str(tmp_path), ranks=2)
    assert first == second
    assert all(Path(path).is_file() for path in first)


def keeps_sharded(rank: int, folder: str) -> None:
    path, _ = keeps(rank, folder, (0, 3), shard_optimizers=True)
    assert len(torch.load(path)["optimizers"][0]["state"]) == 4


def test_shards_go_to_the_rank_that_writes(pool: Pool, tmp_path: Path) -> None:
    pool.run(keeps_sharded, str(tmp_path), ranks=2)


class TrainsAnother(Classifier):
    """Holds a part in a list, where nothing finds its parameters."""

    def configure_optimizers(self) -> Any:
        self.parts = [nn.Linear(2, 2)]
        return torch.optim.SGD([*self.parameters(), *self.parts[0].parameters()])


def trains_another(rank: int) -> str:
    with pytest.raises(ValueError, match="configure_optimizers hold 2 parameters that TrainsAnother lacks") as error:
        trainer().fit(TrainsAnother(), loader(6))
    return str(error.value)


def test_an_optimizer_of_foreign_parameters(pool: Pool) -> None:
    assert len(set(pool.run(trains_another, ranks=2))) == 1


class SavesAlone(Callback):
    def __init__(self, folder: str) -> None:
        self.path = Path(folder) / "mine.ckpt"

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 0:
            trainer.save_checkpoint(self.path)


def saves_alone(rank: int, folder: str) -> str:
    try:
        trainer(callbacks=SavesAlone(folder)).fit(Classifier(), loader(50, 6))
    except JoinError as error:
        return str(error)
    return "fine"


def test_a_checkpoint_on_one_rank_only_is_an_error(ending: Ending, tmp_path: Path) -> None:
    for text in ending.run(saves_alone, str(tmp_path), ranks=2):
        assert "announced different bursts" in text


class WaitsForOthers(Callback):
    """Rank 1 begins no second batch before rank 0 has given up."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == batch_idx == 1:
            wait_for([0])


def hangs(rank: int, samples: int) -> str:
    try:
        trainer(strategy={"timeout": 1.0}, callbacks=WaitsForOthers()).fit(Classifier(), loader(samples, 4))
    except JoinError as error:
        tell()
        return f"{type(error).__name__}: {error}"
    return "fine"


@in_test_all
@pytest.mark.parametrize("samples", [16, 20], ids=["even", "uneven"])
def test_the_timeout_holds_whatever_the_data(ending: Ending, samples: int) -> None:
    told = "JoinTimeoutError: Ranks [1] announced no collective within timeout=1 s"
    assert ending.run(hangs, samples, ranks=2)[0].startswith(told)


class StopsAtOnce(Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        trainer.should_stop = trainer.global_rank == 1


def stops(rank: int) -> int:
    run = trainer(max_epochs=3, callbacks=StopsAtOnce())
    run.fit(Classifier(), loader(20, 4))
    return run.epochs


def test_stopping_on_one_rank(pool: Pool) -> None:
    assert pool.run(stops, ranks=2) == [0, 0]


class Own(torch.utils.data.Sampler[int]):
    """14 samples for rank 0, 8 for rank 1: both end with a batch of 2."""

    num_replicas = 2

    def __iter__(self) -> Any:
        return iter(range(14) if torch.distributed.get_rank() == 0 else range(14, 22))

    def __len__(self) -> int:
        return 14 if torch.distributed.get_rank() == 0 else 8


def own_shares(rank: int) -> dict[str, torch.Tensor]:
    module = Classifier()
    trainer().fit(module, torch.utils.data.DataLoader(dataset(22), 6, sampler=Own()))
    return flat_state(module.state_dict())


def test_a_last_batch_beside_a_full_one(pool: Pool) -> None:
    module = Classifier()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    x, y = dataset(22).tensors
    for indices in ([*range(6), *range(14, 20)], [*range(6, 12), 20, 21], [12, 13]):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x[indices]), y[indices]).backward()
        optimizer.step()
    for state in pool.run(own_shares, ranks=2):
        assert_same(state, flat_state(module.state_dict()), TOLERANCE)


class Autocasts(Classifier):
    def shared_step(self, batch: Any, stage: str) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().shared_step(batch, stage)


def half_accumulated(rank: int, ranks: int) -> dict[str, torch.Tensor]:
    module = Autocasts(optimizer="sgd")
    run = trainer(max_epochs=2, accumulate_grad_batches=2 // ranks)
    run.fit(module, loader(50, 6))
    return flat_state(module.state_dict())


def test_half_precision_equals_accumulation_in_one_process(pool: Pool) -> None:
    """The same batches; the small last one of an epoch is weighed in its loss, of which bfloat16 rounds gradients."""
    for state in pool.run(half_accumulated, 2, ranks=2):
        assert_same(state, half_accumulated(0, 1), 1e-4)

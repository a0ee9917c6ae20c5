"""Faults that were found in scripts of users, each with its siblings."""

from __future__ import annotations

import copy
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from typing_extensions import override

from joinables.trainer import Callback, CSVLogger, NotPicklable, Trainer, TrainModule
from tests.ending import Ending
from tests.harness import Pool, in_test_all
from tests.joinables.trainer.modules import FEATURES, Classifier, dataset, loader
from tests.joinables.trainer.ranks import trainer
from tests.sync_norm import CPUSyncBatchNorm, sync_batch_norm_on_cpu
from tests.training import TOLERANCE, assert_same, flat_state

# -- streams that every rank reads as a whole


class Stream(IterableDataset[Any]):
    def __init__(self, by_rank: bool) -> None:
        self.by_rank = by_rank

    def __iter__(self) -> Any:
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if self.by_rank else (0, 1)
        samples = dataset(26)
        return iter([samples[index] for index in range(rank, 26, ranks)])


class Shuffled(Stream):
    def __iter__(self) -> Any:
        return iter(sorted(super().__iter__(), key=lambda sample: sample[0][dist.get_rank()].item())[:10])


def reads(rank: int, kind: str) -> tuple[str, list[str]]:
    stream = Shuffled(False) if kind == "shuffled" else Stream(kind == "split")
    data: Any = DataLoader(stream, 8) if kind != "list" else list(DataLoader(stream, 8))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer().fit(Classifier(), data)
        except ValueError as error:
            return str(error), []
    return "", [str(each.message) for each in caught if "same samples" in str(each.message)]


@pytest.mark.parametrize("kind", ["whole", "list", "split", "shuffled"])
def test_a_stream_that_every_rank_reads(pool: Pool, kind: str) -> None:
    """In the same order, or in different ones."""
    for rank, (text, warned) in enumerate(pool.run(reads, kind)):
        told = "ranks [0, 1, 2] begins with the same batch" in text and "[J882]" in text
        assert told == (kind in ("whole", "list"))
        assert len(warned) == (kind == "shuffled" and rank == 0)


# -- hooks of batches


class Ends(Classifier):
    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == self.at else None


class EndsToo(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 3 else None


@pytest.mark.parametrize(("at", "callbacks", "steps"), [(0, [], 0), (2, [], 4), (9, [EndsToo()], 6)])
@pytest.mark.filterwarnings("ignore:An epoch made no optimizer step")
def test_a_hook_ends_an_epoch(at: int, callbacks: list[Any], steps: int) -> None:
    run = trainer(max_epochs=2, callbacks=callbacks)
    run.fit(Ends(at), loader(30, 6))
    assert (run.global_step, run.epochs) == (steps, 2)


class EndsAlone(Classifier):
    """Ends the epoch of rank 1 before its second batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if self.trainer.global_rank == batch_idx == 1 else None


def ends_alone(rank: int) -> Any:
    module = EndsAlone()
    run = trainer(max_epochs=2)
    run.fit(module, loader(24, 6))
    return flat_state(module.state_dict()), run.callback_metrics["train_loss"], run.global_step


def test_a_hook_ends_an_epoch_of_one_rank(pool: Pool) -> None:
    """The ranks have equally many batches. A single process trains on those that are left."""
    alone, x, y = Classifier(), *dataset(24).tensors
    run = trainer(max_epochs=2)
    run.fit(alone, [(x[:12], y[:12]), (x[12:18], y[12:18])])
    for state, loss, steps in pool.run(ends_alone, ranks=2):
        assert_same(state, flat_state(alone.state_dict()), TOLERANCE)
        assert abs(loss - run.callback_metrics["train_loss"]) < 1e-5 and steps == run.global_step == 4


def ends_by_a_callback(rank: int) -> Any:
    module = Classifier()
    trainer(callbacks=[EndsToo()] if rank == 0 else []).fit(module, loader(48, 6))
    return flat_state(module.state_dict())


def test_a_callback_of_one_rank_ends_its_epoch(pool: Pool) -> None:
    """A launcher has started the ranks, so each has callbacks of its own; their numbers of batches are the same."""
    alone, x, y = Classifier(), *dataset(48).tensors
    trainer().fit(alone, [(x[:12], y[:12]), (x[12:24], y[12:24]), (x[24:36], y[24:36]), (x[42:], y[42:])])
    for state in pool.run(ends_by_a_callback, ranks=2):
        assert_same(state, flat_state(alone.state_dict()), TOLERANCE)


class Boxed(Classifier):
    """Keeps an average of its weights outside of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.box = [copy.deepcopy(self.body)]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for average, own in zip(self.box[0].parameters(), self.body.parameters(), strict=True):
                average.lerp_(own, 0.1)


class Kept(Callback):
    ema: Any = None

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.ema = copy.deepcopy(module.body)


class Listed(Callback):
    """Keeps an average in a list of tensors."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.average = [parameter.detach().clone() for parameter in module.parameters()]
        self.constants = [torch.ones(2)]

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for average, own in zip(self.average, module.parameters(), strict=True):
            average.lerp_(own.detach(), 0.1)


class Decays(Classifier):
    """Lists some of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.decayed = [parameter for parameter in self.parameters() if parameter.ndim > 1]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...


class Holds(Callback):
    """Holds the module."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self.module = module

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None: ...


class Told(Kept):
    def state_dict(self) -> dict[str, Any]:
        return {}


def drifts(rank: int, samples: int, kind: str) -> list[str]:
    module = {"Boxed": Boxed, "Decays": Decays}.get(kind, Classifier)()
    callbacks = {"Kept": Kept, "Listed": Listed, "Told": Told, "Holds": Holds}
    data = loader(samples, 6) if samples else Lengthless(list(loader(18, 6))[2 * rank : 2 + rank])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(max_epochs=2, callbacks=[callbacks[kind]()] if kind in callbacks else []).fit(module, data)
    return [str(each.message) for each in caught if "have called hooks" in str(each.message)]


@pytest.mark.parametrize(
    ("kind", "samples", "names"),
    [
        ("Boxed", 6, "box"),
        ("Boxed", 18, ""),
        ("Kept", 6, "ema"),
        ("Listed", 6, "average"),
        ("Boxed", 0, "box"),
        ("Told", 6, ""),
        ("Decays", 6, ""),
        ("Holds", 6, ""),
    ],
)
def test_state_of_hooks_that_ranks_without_data_do_not_call(pool: Pool, kind: str, samples: int, names: str) -> None:
    told = pool.run(drifts, samples, kind)[0]
    assert len(told) == bool(names)
    assert not names or f"less often, so {kind}.{names} may differ" in told[0]


# -- resuming in the middle of an epoch


class Counted(Dataset[Any]):
    """Counts the samples that were read, in workers too."""

    def __init__(self) -> None:
        self.samples, self.read = dataset(60), torch.zeros(60).share_memory_()

    def __len__(self) -> int:
        return 60

    @override
    def __getitem__(self, index: int) -> Any:
        self.read[index] += 1
        return self.samples[index]


def resumes(rank: int, folder: Path, workers: int) -> Any:
    for steps in (4, 100):
        data, module = Counted(), Classifier(dropout=0.5)
        run = trainer(max_epochs=1, max_steps=steps, seed=3)
        batches = DataLoader(data, 4, shuffle=True, num_workers=workers)
        run.fit(module, batches, ckpt_path=folder / "cut.ckpt" if steps == 100 else None)
        if steps == 4:
            run.save_checkpoint(folder / "cut.ckpt")
            if dist.is_initialized():
                dist.barrier()
    whole = Classifier(dropout=0.5)
    trainer(max_epochs=1, seed=3).fit(whole, loader(60, 4, shuffle=True))
    same = all(torch.equal(one, other) for one, other in zip(module.parameters(), whole.parameters(), strict=True))
    return int(data.read.sum()), same


@pytest.mark.parametrize("workers", [pytest.param(0, marks=in_test_all), 2])
def test_resuming_skips_indices_and_reads_no_sample_again(ending: Ending, tmp_path: Path, workers: int) -> None:
    assert resumes(0, tmp_path, workers) == (60 - 16, True)
    found = ending.run(resumes, tmp_path, workers, ranks=3)
    assert sum(read for read, _ in found) == 60 - 3 * 16
    assert all(same for _, same in found)


# -- names that manual optimization needs


class Pair(TrainModule):
    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(FEATURES, 4), nn.Linear(4, 1)
        self.two.bias.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        self.steps = self.trainer.estimated_stepping_batches
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.one, self.two)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.logger is self.trainer.logger
        for optimizer, part in zip(self.optimizers(), (self.one, self.two), strict=True):
            self.toggle_optimizer(optimizer)
            assert [p.requires_grad for p in part.parameters()] == [True, part is self.one]
            assert sum(p.requires_grad for p in self.parameters()) == 2 - (part is self.two)
            optimizer.zero_grad()
            self.manual_backward(self.two(self.one(batch[0])).square().mean())
            self.clip_gradients(optimizer, 1e-3)
            grads = [p.grad for p in part.parameters() if p.grad is not None]
            assert torch.cat([g.flatten() for g in grads]).norm() <= 1.01e-3
            self.clip_gradients(optimizer, 1e-5, "value")
            assert max(g.abs().max() for g in grads) <= 1e-5
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        assert [p.requires_grad for p in self.parameters()] == [True, True, True, False]


def manual(rank: int) -> Any:
    module = Pair()
    trainer(max_epochs=2, accumulate_grad_batches=1).fit(module, loader(27, 4))
    return module.steps, flat_state(module.state_dict())


def test_what_manual_optimization_calls(pool: Pool) -> None:
    steps, state = manual(0)
    assert steps == 14
    for found, other in pool.run(manual):
        assert found == 6  # three batches on rank 0
        assert other.keys() == state.keys()


def test_estimates_and_loggers(tmp_path: Path) -> None:
    log, found = CSVLogger(tmp_path), list[Any]()
    run = trainer(max_steps=5, logger=[log])
    module = Classifier()
    module.on_train_start = lambda: found.append((run.estimated_stepping_batches, module.logger))  # type: ignore[method-assign]
    run.fit(module, loader(18, 6))
    assert found == [(5, log)]
    run = trainer(max_epochs=2, accumulate_grad_batches=2)
    module.on_train_start = lambda: found.append((run.estimated_stepping_batches, module.logger))  # type: ignore[method-assign]
    run.fit(module, loader(18, 6))
    assert found[1:] == [(4, None)]


class Locked(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.held = {"lock": threading.Lock()}


@pytest.mark.usefixtures("script")
def test_the_cause_of_a_module_that_cannot_be_pickled() -> None:
    with pytest.raises(NotPicklable, match=r"The cause is Locked\.held\['lock'\], of type lock\..*\[J230\]"):
        Trainer(devices=2, accelerator="cpu", strategy="ddp_spawn").fit(Locked(), loader(6))


# -- parameters that a step does not reach


class Spare(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        return super().training_step(batch, batch_idx)


def unused(rank: int, samples: int) -> Any:
    module = Spare()
    with pytest.raises(RuntimeError) as caught:
        trainer().fit(module, loader(samples, 6))
    return module.steps, str(caught.value)


@pytest.mark.parametrize("samples", [54, 30])
def test_an_unused_parameter_is_named_in_the_first_step(pool: Pool, samples: int) -> None:
    for steps, text in pool.run(unused, samples):
        assert steps <= 1
        assert "(spare.weight, spare.bias)" in text or "rank" in text
        assert "[J640]" in text
        assert "ddp_find_unused_parameters_true" in text


# -- SyncBatchNorm


class Norms(Classifier):
    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.norm = nn.Sequential(nn.BatchNorm1d(FEATURES))
        self.kinds = list[str]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kinds.append(type(self.norm[0]).__name__)
        return super().forward(self.norm(x))


def syncs(rank: int, samples: int, stream: bool, accumulated: int = 1) -> Any:
    module = Norms()
    before = module.norm[0]
    data: Any = loader(samples, 4)
    if stream:
        data = Lengthless(list(data)[rank :: dist.get_world_size()])
    options: dict[str, Any] = {"sync_batchnorm": True, "find_unused_parameters": False}
    with pytest.MonkeyPatch.context() as patch, sync_batch_norm_on_cpu():
        patch.setattr(nn, "SyncBatchNorm", CPUSyncBatchNorm)
        try:
            run = trainer(strategy=options, max_epochs=2, accumulate_grad_batches=accumulated)
            run.fit(module, data, loader(9, 4))
        except ValueError as error:
            return str(error), module.norm[0] is before, len(module.kinds)
    return flat_state(module.state_dict()), module.norm[0] is before, set(module.kinds)


class Lengthless:
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


@pytest.mark.parametrize(("samples", "stream", "accumulated"), [(24, False, 1), (23, False, 2), (24, True, 1)])
def test_batch_norm_over_all_ranks(pool: Pool, samples: int, stream: bool, accumulated: int) -> None:
    alone = Norms()
    trainer(max_epochs=2, accumulate_grad_batches=accumulated).fit(alone, loader(samples, 12), loader(9, 4))
    for state, is_reverted, kinds in pool.run(syncs, samples, stream, accumulated):
        assert_same(state, flat_state(alone.state_dict()), TOLERANCE)
        assert is_reverted
        assert kinds == {"CPUSyncBatchNorm"}


@pytest.mark.parametrize("stream", [False, True])
def test_batch_norm_over_uneven_ranks_is_refused(pool: Pool, stream: bool) -> None:
    for text, is_reverted, steps in pool.run(syncs, 28, stream):
        assert "sync_batchnorm=True needs equally many" in text
        assert "join.iterate" in text
        assert is_reverted
        assert steps == (1 if stream else 0)  # a batch is read before the one ahead of it is trained on


# -- a run that follows another


class Other(TrainModule):
    """Has the backbone of a classifier that was trained."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("accuracy", (self.body(batch[0]).argmax(1) == batch[1]).double().mean())


@pytest.mark.parametrize("devices", [1, 2])
def test_another_module_with_the_same_backbone_is_tested(devices: int) -> None:
    module = Classifier()
    run = Trainer(devices=devices, accelerator="cpu", max_epochs=3)
    run.fit(module, loader(30, 6 if devices == 2 else 12))
    (tested,) = run.test(Other(module.body), loader(30, 6))
    (own,) = run.test(module, loader(30, 6))
    assert tested["accuracy"] == pytest.approx(own["test_accuracy"])

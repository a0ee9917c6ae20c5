"""Training that goes on where killed ranks have left it: by hand, or by the trainer; and whether it was exact."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from join import Join
from joinables.trainer import Callback, ModelCheckpoint, Trainer, UnevenDistributedSampler
from tests.joinables.trainer.modules import Classifier, dataset
from tests.training import TOLERANCE, assert_same, flat_state

SAMPLES, GLOBAL_BATCH, EPOCHS = 50, 12, 2  # in the last step of an epoch rank 0 has 2 samples, and the others none
STEPS = EPOCHS * -(-SAMPLES // GLOBAL_BATCH)


@dataclass(frozen=True)
class Kill:
    """When a rank is killed: at this step, or where its attempt begins, if that is later; at -1, alone on its way."""

    step: int
    rank: int
    is_over: bool  # the step, but not yet in a checkpoint
    agent: bool = False  # whether its torchrun is killed, too, as where a machine is lost


class Diary:
    """What one rank trains on from one start to the next, and when it is killed."""

    def __init__(self, folder: Path, kills: tuple[Kill, ...]) -> None:
        self._folder, self._attempt = folder, len(list(folder.glob("killed-*")))
        self._kill = dict(enumerate(kills)).get(self._attempt)
        self._rank = int(os.environ["RANK"])
        self.may_be_killed(-1, is_over=False)

    def begins(self, step: int) -> None:
        (self._folder / f"attempt-{self._attempt}").write_text(str(step))

    def uses(self, step: int, numbers: torch.Tensor) -> None:
        with (self._folder / f"used-{self._attempt}-{self._rank}").open("a") as file:
            file.write(" ".join(map(str, [step, *numbers.tolist()])) + "\n")

    def may_be_killed(self, step: int, is_over: bool) -> None:
        kill = self._kill
        if kill is None or (kill.rank, kill.is_over) != (self._rank, is_over) or step < kill.step:
            return
        time.sleep(0.5 if step < 0 else 0.0)
        (self._folder / f"killed-{self._attempt}").touch()
        if kill.agent:
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def ends(self, *objects: Any) -> None:
        torch.save(flat(*objects), self._folder / f"end-{self._rank}")


def flat(module: Any, optimizer: Any, scheduler: Any) -> dict[str, torch.Tensor]:
    return flat_state(module.state_dict(), optimizer.state_dict()["state"], scheduler.get_last_lr())


def what_counts(folder: Path) -> list[int]:
    """The samples of the steps that the last state comes from, sorted: those before the next attempt's first one."""
    begun = {file.name.partition("-")[2]: int(file.read_text()) for file in sorted(folder.glob("attempt-*"))}
    found: list[int] = []
    for attempt, end in zip(begun, [*list(begun.values())[1:], STEPS], strict=True):
        for file in folder.glob(f"used-{attempt}-*"):
            lines = [list(map(int, line.split())) for line in file.read_text().splitlines()]
            found += [number for step, *numbers in lines if step < end for number in numbers]
    return sorted(found)


def numbered() -> TensorDataset:
    return TensorDataset(*dataset(SAMPLES).tensors, torch.arange(SAMPLES))


def by_hand(folder: Path, kills: tuple[Kill, ...]) -> None:
    """A loop of one's own: loaders go on where they were, or what is left is dealt out anew."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    diary = Diary(folder, kills)
    if not dist.is_initialized():  # as Ray has done
        dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, optimizer, scheduler = objects()
    model = DistributedDataParallel(model)
    sampler = UnevenDistributedSampler(numbered(), shuffle=True, seed=1, block_size=GLOBAL_BATCH // ranks)
    last, saved = folder / "last.pt", {"epoch": 0, "start": 0, "steps": 0, "used": 0, "total": 0, "loaders": []}
    if last.exists():
        saved = torch.load(last)
        for each, state in zip((model, optimizer, scheduler), saved["states"], strict=True):
            each.load_state_dict(state)
    total = saved["total"]
    diary.begins(total)
    for epoch in range(saved["epoch"], EPOCHS):
        loader: Any = StatefulDataLoader(numbered(), sampler.block_size, sampler=sampler)
        goes_on = epoch == saved["epoch"]
        as_before = goes_on and len(saved["loaders"]) == ranks
        sampler.set_epoch(epoch, saved["start" if as_before else "used"] if goes_on else 0)
        steps = saved["steps"] if as_before else 0
        if as_before:
            loader.load_state_dict(saved["loaders"][rank])
        with Join([model, optimizer, scheduler]) as join:
            for x, y, numbers in join.iterate(loader, weigh=lambda data: len(data[0]), resumable=True):
                diary.may_be_killed(total, is_over=False)
                diary.uses(total, numbers)
                optimizer.zero_grad()
                join.scale(cross_entropy(model(x), y)).backward()
                optimizer.step()
                diary.may_be_killed(total, is_over=True)
                steps, total = steps + 1, total + 1
                if total % 2 == 0:
                    loaders: list[Any] = [None] * ranks
                    dist.all_gather_object(loaders, join.loader_state())
                    state = {"epoch": epoch, "start": sampler.start, "steps": steps, "used": sampler.used(steps)}
                    states = [each.state_dict() for each in (model, optimizer, scheduler)]
                    if rank == 0:
                        torch.save({**state, "total": total, "loaders": loaders, "states": states}, folder / "new")
                        (folder / "new").replace(last)
        scheduler.step()
    diary.ends(model.module, optimizer, scheduler)
    dist.barrier()
    dist.destroy_process_group()


def objects() -> tuple[Any, Any, Any]:
    module = Classifier().body
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    return module, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def alone() -> dict[str, torch.Tensor]:
    """Both in one process, without anything of ours."""
    module, optimizer, scheduler = objects()
    for epoch in range(EPOCHS):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1 + epoch))
        for numbers in order.split(GLOBAL_BATCH):
            x, y, _ = numbered()[numbers]
            optimizer.zero_grad()
            cross_entropy(module(x), y).backward()
            optimizer.step()
        scheduler.step()
    return flat(module, optimizer, scheduler)


class Watched(Classifier):
    """A module that tells the diary."""

    def __init__(self, diary: Diary) -> None:
        super().__init__()
        self.diary = diary

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.diary.uses(self.trainer.global_step, batch[2])
        return super().training_step(batch[:2], batch_idx)


class Tells(Callback):
    """Tells the diary of steps, before a checkpoint is written of one."""

    def __init__(self, diary: Diary) -> None:
        self.diary = diary

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.diary.begins(trainer.global_step)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.diary.may_be_killed(trainer.global_step, is_over=False)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.diary.may_be_killed(trainer.global_step - 1, is_over=True)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        (optimizer,), (scheduler,) = trainer.run.optimizers, trainer.run.schedulers
        self.diary.ends(module.body, optimizer, scheduler.scheduler)


def by_the_trainer(folder: Path, kills: tuple[Kill, ...]) -> None:
    module, last = Watched(Diary(folder, kills)), folder / "last.ckpt"
    keeper = ModelCheckpoint(folder, save_last=True, save_top_k=0, every_n_train_steps=2)
    callbacks = [Tells(module.diary), keeper]
    trainer = Trainer(accelerator="cpu", max_epochs=EPOCHS, seed=1, callbacks=callbacks, logger=False)
    loader = DataLoader(numbered(), GLOBAL_BATCH // trainer.world_size, shuffle=True)
    trainer.fit(module, loader, ckpt_path=last if last.exists() else None)


WORK = {"by hand": by_hand, "by the trainer": by_the_trainer}


def assert_exact(folder: Path, ranks: int) -> None:
    assert what_counts(folder) == sorted(EPOCHS * list(range(SAMPLES)))
    expected, found = alone(), [torch.load(each) for each in folder.glob("end-*")]
    assert len(found) == ranks
    for state in found:
        assert_same(state, expected, TOLERANCE)

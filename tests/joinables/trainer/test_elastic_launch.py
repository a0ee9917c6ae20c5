"""Ranks that are killed under torchrun, which starts all of them anew: each sample once, as in one process.

What is launched is torchrun's own, with workers that are forked; ``tests/test_scripts.py`` has a script under it.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from join import Join
from joinables.trainer import Callback, ModelCheckpoint, Trainer, UnevenDistributedSampler
from tests.ending import Ending
from tests.joinables.trainer.modules import Classifier, dataset
from tests.models import TOLERANCE, assert_same, flat_state
from tests.selection import ALL

SAMPLES, GLOBAL_BATCH, EPOCHS = 50, 12, 2  # in the last step of an epoch rank 0 has 2 samples, and the others none
STEPS = EPOCHS * -(-SAMPLES // GLOBAL_BATCH)

pytestmark = pytest.mark.timeout(400)


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
            for x, y, numbers in join.iterate(loader, weigh=lambda data: len(data[0])):
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
    trainer = Trainer(accelerator="cpu", max_epochs=EPOCHS, seed=1, callbacks=[Tells(module.diary), keeper])
    loader = DataLoader(numbered(), GLOBAL_BATCH // trainer.world_size, shuffle=True)
    trainer.fit(module, loader, ckpt_path=last if last.exists() else None)


WORK = {"by hand": by_hand, "by the trainer": by_the_trainer}


def as_worker(work: str, folder: str, kills: tuple[Kill, ...]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork of torchrun has torchrun's own way
    WORK[work](Path(folder), kills)


def torchrun(rank: int, work: str, folder: str, nodes: int, ranks: int, restarts: int, *kills: Kill) -> str:
    """One of ``nodes`` agents, or of fewer if some are lost, with as many ``ranks``; how its last attempt ended."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    tempfile.tempdir = folder  # what a killed process leaves goes there, too
    # torchrun's store outlives ranks, and has the addresses of those that are gone. The trainer knows that.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = str(int(work == "by hand"))
    # A node is lost when nobody has heard of it for 10 s; a slow machine must not look like that.
    waits = {"store_type": "file", "last_call_timeout": 1, "keep_alive_interval": 1, "keep_alive_max_attempt": 10}
    config = LaunchConfig(
        min(nodes, 2),
        nodes,
        ranks,
        run_id=f"{nodes} times {ranks}",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{folder}/rendezvous",
        rdzv_configs=waits,
        max_restarts=restarts,
        logs_specs=DefaultLogsSpecs(folder),
        start_method="fork",
        local_addr="localhost",
    )
    try:
        elastic_launch(config, as_worker)(work, folder, kills)
    except ChildFailedError as error:
        return str(error)
    return "done"


def assert_exact(folder: Path, ranks: int) -> None:
    assert what_counts(folder) == sorted(EPOCHS * list(range(SAMPLES)))
    expected, found = alone(), [torch.load(each) for each in folder.glob("end-*")]
    assert len(found) == ranks
    for state in found:
        assert_same(state, expected, TOLERANCE)


ALONE: dict[str, Any] = {"group": False, "limit": 150}  # seconds, for a slow machine
SEEDS = range(10) if ALL else range(1)
SOME_WORK = WORK if ALL else [*WORK][:1]


def drawn(seed: int, count: int, **where: Any) -> list[Kill]:
    draw = random.Random(seed)
    steps = sorted(draw.sample(range(STEPS - 1), count))
    return [Kill(step, draw.randrange(3), draw.random() < 0.5, **where) for step in steps]


@pytest.mark.parametrize("work", SOME_WORK)
@pytest.mark.parametrize("seed", SEEDS)
def test_as_many_ranks_go_on(ending: Ending, tmp_path: Path, work: str, seed: int) -> None:
    kills = drawn(seed, 2)
    assert ending.run(torchrun, work, str(tmp_path), 1, 3, 2, *kills, ranks=1, **ALONE) == ["done"], kills
    assert len(list(tmp_path.glob("killed-*"))) == 2
    assert_exact(tmp_path, 3)


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("seed", SEEDS)
def test_fewer_ranks_go_on(ending: Ending, tmp_path: Path, work: str, seed: int) -> None:
    """Three ranks have one attempt, and then two another one."""
    kills = drawn(seed, 2)
    (told,) = ending.run(torchrun, work, str(tmp_path), 1, 3, 1, *kills, ranks=1, **ALONE)
    assert told != "done"
    assert ending.run(torchrun, work, str(tmp_path), 1, 2, 0, ranks=1, **ALONE) == ["done"], kills
    assert_exact(tmp_path, 2)


@pytest.mark.parametrize("work", SOME_WORK)
def test_a_rank_is_killed_before_it_meets_the_others(ending: Ending, tmp_path: Path, work: str) -> None:
    kill = Kill(-1, 1, is_over=False)
    assert ending.run(torchrun, work, str(tmp_path), 1, 3, 1, kill, ranks=1, **ALONE) == ["done"]
    assert_exact(tmp_path, 3)


@pytest.mark.skipif(not ALL, reason="the others wait 10 s for the machine that is lost; run with TESTS=all")
@pytest.mark.parametrize("work", WORK)
def test_a_machine_is_lost(ending: Ending, tmp_path: Path, work: str) -> None:
    """Of three agents with a rank each, one is killed with its rank; the other two go on by themselves."""
    (kill,) = drawn(0, 1, agent=True)
    agents = ending.ends(torchrun, work, str(tmp_path), 3, 1, 3, kill, ranks=3, **ALONE)
    assert sorted(end.code for end in agents) == [-signal.SIGKILL, 0, 0], [end.text for end in agents]
    assert [end.result for end in agents if end.code == 0] == ["done"] * 2
    assert_exact(tmp_path, 2)

"""Training on the ranks of Horovod and PyTorch/XLA, here over fakes of both, and of a launcher on several nodes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from joinables.trainer import Trainer
from tests.conformance.fakes import over_horovod, over_xla
from tests.harness import Pool
from tests.joinables.trainer.modules import Classifier, loader
from tests.joinables.trainer.ranks import free_port, trainer
from tests.training import TOLERANCE, assert_same, flat_state

OPTIONS: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 2}


class Normalised(Classifier):
    """Has buffers, and a parameter that no loss reaches."""

    def __init__(self) -> None:
        super().__init__(optimizer="adamw")
        self.spare = torch.nn.Parameter(torch.ones(3))
        self.norm = torch.nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.norm(x)
        return super().forward(x)


def over(rank: int, name: str, folder: Path, options: dict[str, Any]) -> Any:
    store: Any = dist.distributed_c10d._get_default_store()
    fake = over_horovod if name == "horovod" else over_xla
    with fake(rank, dist.get_world_size(), dist.PrefixStore("library", store)):
        module = Normalised()
        run = Trainer(strategy=name, default_root_dir=folder, **{**OPTIONS, **options})
        assert run.world_size == dist.get_world_size()
        run.fit(module, loader(27, 4))
        run.save_checkpoint(folder / "end.ckpt")
        dist.barrier()
        found = flat_state(module.state_dict())
        again, more = Normalised(), Trainer(strategy=name, **{**OPTIONS, **options, "max_epochs": 3})
        more.fit(again, loader(27, 4), loader(9, 4), ckpt_path=folder / "end.ckpt")
        return found, flat_state(again.state_dict()), more.metrics["val_loss"]


def alone(options: dict[str, Any], epochs: int) -> tuple[Any, float]:
    module = Normalised()
    run = trainer(**{**OPTIONS, **options, "max_epochs": epochs})
    run.fit(module, loader(27, 12), loader(9, 4))
    return flat_state({name: each for name, each in module.state_dict().items() if "norm" not in name}), run.metrics[
        "val_loss"
    ]


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("name", ["horovod", "xla"])
def test_training_over_another_library(pool: Pool, tmp_path: Path, name: str, accumulated: int) -> None:
    """27 samples in batches of 4: three ranks have 3, 2 and 2 batches. The fit resumes from a checkpoint."""
    options = {"accumulate_grad_batches": accumulated}
    (two, _), (three, loss) = alone(options, 2), alone(options, 3)
    results = pool.run(over, name, tmp_path, options, ranks=3)
    for found, resumed, val_loss in results:
        assert_same({each: found[each] for each in two}, two, TOLERANCE)
        assert_same({each: resumed[each] for each in three}, three, TOLERANCE)
        assert val_loss == pytest.approx(loss)
        assert_same(found, results[0][0], 0.0)


class Manual(Classifier):
    automatic_optimization = False


def refused(rank: int, name: str, module: type[Classifier]) -> None:
    """Before anything is sent: Horovod is up, and the ranks go on."""
    store: Any = dist.PrefixStore("library", dist.distributed_c10d._get_default_store())
    fake = over_horovod if name == "horovod" else over_xla
    with fake(rank, dist.get_world_size(), store) as collective:
        if module is Classifier:
            collective._runtime.addressable_device_count = lambda: 2
        for _ in range(2):
            with pytest.raises(ValueError, match=r"Strategy .* manual optimization nor .* threads.*\[J880\]"):
                Trainer(strategy=name, **OPTIONS).fit(module(), loader(27, 4))
        assert name == "xla" or sys.modules["horovod.torch"].is_up
        if module is Manual:
            Trainer(strategy=name, **OPTIONS).validate(module(), loader(27, 4))


@pytest.mark.parametrize(("name", "module"), [("horovod", Manual), ("xla", Manual), ("xla", Classifier)])
def test_what_is_refused(pool: Pool, name: str, module: type[Classifier]) -> None:
    pool.run(refused, name, module, ranks=2)


def test_a_library_that_is_not_installed() -> None:
    for name, code in (("horovod", "J861"), ("xla", "J863")):
        with pytest.raises(ImportError, match=code):
            Trainer(strategy=name, accelerator="cpu")


# -- several nodes


class Home(Classifier):
    ranks: Any = None

    def add_to_queue(self, queue: Any) -> None:
        queue.put(self.global_rank)
        queue.put(self.trainer.local_rank)

    def get_from_queue(self, queue: Any) -> None:
        self.ranks = queue.get(), queue.get()


class Pruned(Exception):
    """As of a search for hyperparameters, which ends a trial on all ranks."""


class Prunes(Classifier):
    def on_train_epoch_end(self) -> None:
        raise Pruned


def trials(rank: int, port: int, folder: Path, results: Any) -> None:
    os.chdir(folder)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    with pytest.raises(Pruned):
        Trainer(**OPTIONS).fit(Prunes(), loader(18, 6))
    module = Classifier()
    Trainer(**OPTIONS).fit(module, loader(18, 6))
    results.put(pickle.dumps((rank, flat_state(module.state_dict()))))


def test_a_fit_under_a_launcher_after_one_that_all_ranks_have_ended(tmp_path: Path, server: None) -> None:
    single = Classifier()
    trainer(max_epochs=2, accelerator="cpu").fit(single, loader(18, 12))
    for _, state in started(trials, tmp_path):
        assert_same(state, flat_state(single.state_dict()), TOLERANCE)


def started(fn: Any, folder: Path) -> list[Any]:
    """The results of a function in two processes, with the numbers 0 and 1."""
    context, port = multiprocessing.get_context("forkserver"), free_port()
    results = context.SimpleQueue()
    processes = [context.Process(target=fn, args=(number, port, folder, results)) for number in (0, 1)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(100)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return sorted([pickle.loads(results.get()), pickle.loads(results.get())], key=lambda result: result[0])


def parent(node: int, port: int, folder: Path, results: Any) -> None:
    os.chdir(folder)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": str(node)}
    module, home = Home(), Home()
    options: dict[str, Any] = {"devices": 2, "num_nodes": 2, "strategy": "ddp_fork", "logger": False}
    run = Trainer(**{**OPTIONS, **options})
    run.fit(module, loader(18, 6))  # three batches for four ranks
    run.max_epochs = 3
    run.fit(module, loader(18, 6))
    outputs = Trainer(**{**OPTIONS, **options}).predict(home, loader(18, 6))
    results.put(pickle.dumps((node, module.ranks, flat_state(module.state_dict()), run.global_step, len(outputs))))


def test_two_nodes(tmp_path: Path, server: None) -> None:
    """Two parents on one machine; each gets the output of its first rank."""
    single = Home()
    trainer(max_epochs=3, accelerator="cpu").fit(single, loader(18, 18))
    found = started(parent, tmp_path)
    assert [(node, ranks, steps, outputs) for node, ranks, _, steps, outputs in found] == [
        (0, (0, 0), 3, 3),
        (1, (2, 0), 3, 0),
    ]
    for _, _, state, *_ in found:
        assert_same(state, flat_state(single.state_dict()), TOLERANCE)


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT", "NODE_RANK"])
def test_nodes_without_an_address(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "host", "MASTER_PORT": "29500", "NODE_RANK": "1"}.items():
        if name != missing:
            monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing, raising=False)
    with pytest.raises(ValueError, match=r"num_nodes=2 do not fit.* set MASTER_ADDR, MASTER_PORT and NODE_RANK"):
        Trainer(devices=2, num_nodes=2, accelerator="cpu")

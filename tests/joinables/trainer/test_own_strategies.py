"""Training on the ranks of Horovod and PyTorch/XLA, here over fakes of both, and of a launcher on several nodes."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from joinables.processes import run
from joinables.trainer import Strategy, Trainer
from tests.conformance.fakes import over_horovod, over_xla
from tests.harness import Pool, all_or_each, in_test_all
from tests.joinables.trainer.modules import Classifier, loader
from tests.joinables.trainer.other_library import OPTIONS, check_fits
from tests.joinables.trainer.ranks import free_port, trainer
from tests.training import TOLERANCE, assert_same, flat_state


def over(rank: int, name: str, folder: Path, options: dict[str, Any]) -> None:
    store: Any = dist.distributed_c10d._get_default_store()
    fake = over_horovod if name == "horovod" else over_xla
    with fake(rank, dist.get_world_size(), dist.PrefixStore("library", store)) as collective:
        collective.setup(rank, dist.get_world_size())
        check_fits(collective, name, folder, **options)


@in_test_all
@pytest.mark.parametrize(("name", "accumulated"), all_or_each(product(["horovod", "xla"], [1, 2])))
def test_training_over_another_library(pool: Pool, tmp_path: Path, name: str, accumulated: int) -> None:
    """27 samples in batches of 4: three ranks have 3, 2 and 2 batches. The fit resumes from a checkpoint."""
    pool.run(over, name, tmp_path, {"accumulate_grad_batches": accumulated}, ranks=3)


class OwnBlock(Strategy):
    def block(self, listed: Any, *, enable: bool) -> Any:
        return nullcontext()


def test_a_block_of_ones_own_that_reports_nothing() -> None:
    run = Trainer(strategy=OwnBlock(), accelerator="cpu")
    run.fit(Classifier(), loader(12))
    assert run.global_step == 2 and run.join_report is None


class Manual(Classifier):
    automatic_optimization = False


def refused(rank: int, name: str, module: type[Classifier]) -> None:
    """Before anything is sent: Horovod is up, and the ranks go on."""
    store: Any = dist.PrefixStore("library", dist.distributed_c10d._get_default_store())
    fake = over_horovod if name == "horovod" else over_xla
    with fake(rank, dist.get_world_size(), store):
        library: Any = sys.modules["horovod.torch" if name == "horovod" else "torch_xla.runtime"]
        if module is Classifier:
            library.addressable_device_count = lambda: 2
        for _ in range(2):
            with pytest.raises(ValueError, match=r"Strategy .* manual optimization nor .* threads.*\[J880\]"):
                Trainer(strategy=name, **OPTIONS).fit(module(), loader(27, 4))
        assert name == "xla" or library.is_up
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
        queue.put(self.trainer.global_rank)
        queue.put(self.trainer.run.place.local_rank)

    def get_from_queue(self, queue: Any) -> None:
        self.ranks = queue.get(), queue.get()


class Pruned(Exception):
    """As of a search for hyperparameters, which ends a trial on all ranks."""


class Prunes(Classifier):
    def on_train_epoch_end(self) -> None:
        raise Pruned


def trials(rank: int, port: int, folder: Path) -> dict[str, torch.Tensor]:
    os.chdir(folder)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    with pytest.raises(Pruned):
        Trainer(**OPTIONS).fit(Prunes(), loader(18, 6))
    module = Classifier()
    Trainer(**OPTIONS).fit(module, loader(18, 6))
    return flat_state(module.state_dict())


def test_a_fit_under_a_launcher_after_one_that_all_ranks_have_ended(tmp_path: Path, server: None) -> None:
    single = Classifier()
    trainer(max_epochs=2, accelerator="cpu").fit(single, loader(18, 12))
    for state in started(trials, tmp_path):
        assert_same(state, flat_state(single.state_dict()), TOLERANCE)


def started(fn: Any, folder: Path) -> list[Any]:
    """The results of a function in two processes, with the numbers 0 and 1."""
    (folder / "reports").mkdir()
    results, failures = run(
        fn, range(2), free_port(), folder, method="forkserver", folder=folder / "reports", limit=100
    )
    assert not failures, failures
    return results


def parent(node: int, port: int, folder: Path) -> Any:
    os.chdir(folder)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": str(node)}
    module, home = Home(), Home()
    options: dict[str, Any] = {"devices": 2, "num_nodes": 2, "strategy": "ddp_fork", "logger": False}
    fits, threads = Trainer(**{**OPTIONS, **options}), os.listdir("/proc/self/task")
    fits.fit(module, loader(18, 6))  # three batches for four ranks
    assert os.listdir("/proc/self/task") == threads  # a lock that one more of them holds would stay locked in a fork
    fits.max_epochs = 3
    fits.fit(module, loader(18, 6))
    outputs = Trainer(**{**OPTIONS, **options}).predict(home, loader(18, 6))
    return module.ranks, flat_state(module.state_dict()), fits.global_step, len(outputs), fits.global_rank


@in_test_all
def test_two_nodes(tmp_path: Path, server: None) -> None:
    """Two parents on one machine; each gets the output of its first rank."""
    single = Home()
    trainer(max_epochs=3, accelerator="cpu").fit(single, loader(18, 18))
    found = started(parent, tmp_path)
    homes = [(ranks, *others) for ranks, _, *others in found]
    assert homes == [((0, 0), 3, 3, 0), ((2, 0), 3, 0, 2)]  # with the first rank of each node
    for _, state, *_ in found:
        assert_same(state, flat_state(single.state_dict()), TOLERANCE)


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT", "NODE_RANK"])
def test_nodes_without_an_address(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "host", "MASTER_PORT": "29500", "NODE_RANK": "1"}.items():
        if name != missing:
            monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing, raising=False)
    with pytest.raises(ValueError, match=r"num_nodes=2 do not fit.* set MASTER_ADDR, MASTER_PORT and NODE_RANK"):
        Trainer(devices=2, num_nodes=2, accelerator="cpu")

"""Objects of the user's own: cluster environments, and objects that save checkpoints."""

from __future__ import annotations

import hashlib
import os
import pickle
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from join import Join
from joinables.trainer import DDPStrategy, FileCheckpointIO, ModelCheckpoint, Trainer
from tests.ending import Ending, assert_blamed
from tests.harness import Pool, in_test_all
from tests.joinables.trainer.modules import Classifier, loader
from tests.joinables.trainer.ranks import free_port, trainer
from tests.sync_norm import CPUSyncBatchNorm, sync_batch_norm_on_cpu


def cluster(rank: Any = 1, ranks: Any = 3, local: Any = 0, port: Any = 1, host: Any = "127.0.0.1") -> Any:
    """A cluster whose ranks are all on nodes of their own."""
    numbers = {"global_rank": lambda: rank, "world_size": lambda: ranks, "local_rank": lambda: local}
    return SimpleNamespace(**numbers, main_address=host, main_port=port)


def in_cluster(rank: int, port: int) -> Any:
    os.environ |= {"RANK": "7", "WORLD_SIZE": "8", "MASTER_ADDR": "nowhere", "MASTER_PORT": "x"}
    run = Trainer(strategy=DDPStrategy(cluster_environment=cluster(rank, port=port)), logger=False)
    module = Classifier()
    place = run.world_size, run.global_rank, run.strategy.place(3).local_rank
    run.fit(module, loader(12, 6))
    return place, [each.detach().clone() for each in module.parameters()]


def test_a_cluster_environment(ending: Ending) -> None:
    """Two batches on three ranks."""
    alone = Classifier()
    trainer().fit(alone, loader(12, 12))
    found = ending.run(in_cluster, free_port(), ranks=3, group=False)
    for rank, (place, parameters) in enumerate(found):
        assert place == (3, rank, 0)
        assert all(map(torch.allclose, parameters, alone.parameters()))


WRONG: list[tuple[Any, str]] = [
    (object(), "AttributeError: 'object' object has no attribute 'global_rank'"),
    (SimpleNamespace(global_rank=1), "TypeError: 'int' object is not callable"),
    (cluster("x"), "ValueError: .*: 'x'"),
    (cluster(3), r"Place\(rank=3, world_size=3, local_rank=0\) at .* is not possible"),
    (cluster(local=-1), "local_rank=-1"),
    (cluster(port=None), "TypeError: int"),
    (cluster(host=None), "at None:1 is not possible"),
]


@pytest.mark.parametrize(("environment", "text"), WRONG, ids=[text for _, text in WRONG])
def test_wrong_cluster_environments(environment: Any, text: str) -> None:
    with pytest.raises(ValueError, match=rf"cluster_environment=.*{text}.*\[J711\]"):
        DDPStrategy(cluster_environment=environment)


def test_a_cluster_environment_of_another_size() -> None:
    with pytest.raises(ValueError, match=r"devices=2 .* or cluster_environment started \(1\).*\[J172\]"):
        Trainer(accelerator="cpu", devices=2, strategy=DDPStrategy(cluster_environment=cluster(0, 1)))


class Pickles:
    """Checkpoints in files of another kind, under names of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def name(self, path: str) -> Path:
        return self.folder / hashlib.sha256(path.encode()).hexdigest()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str) -> None:
        self.name(path).write_bytes(pickle.dumps((path, checkpoint)))

    def load_checkpoint(self, path: str) -> dict[str, Any]:
        return pickle.loads(self.name(path).read_bytes())[1]

    def remove_checkpoint(self, path: str) -> None:
        self.name(path).unlink()

    def paths(self) -> set[str]:
        return {pickle.loads(each.read_bytes())[0] for each in self.folder.iterdir()}


def fitted(files: Path, io: Any, **options: Any) -> tuple[Classifier, ModelCheckpoint]:
    module = Classifier(dropout=0.3)
    keeper = ModelCheckpoint(files, monitor="val_loss", save_last=True, save_top_k=2, every_n_train_steps=1)
    ckpt_path = options.pop("ckpt_path", None)
    run = Trainer(devices=2, strategy="ddp_fork", seed=1, callbacks=keeper, checkpoint_io=io, **options)
    run.fit(module, loader(33, 6, shuffle=True), loader(12), ckpt_path=ckpt_path)
    return module, keeper


@in_test_all
def test_an_object_that_saves_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "pickles").mkdir()
    io, files = Pickles(tmp_path / "pickles"), tmp_path / "files"
    _, keeper = fitted(files, io, max_steps=4)  # within the second epoch
    resumed, later = fitted(files, io, max_epochs=2, ckpt_path=keeper.last_model_path)
    whole, expected = fitted(files, None, max_epochs=2)
    assert all(map(torch.equal, resumed.parameters(), whole.parameters()))
    assert later.best_model_path == expected.best_model_path
    assert io.paths() == {str(path) for path in files.iterdir()} and len(io.paths()) == 3
    found = Trainer(checkpoint_io=io).validate(Classifier(), loader(12), ckpt_path=later.best_model_path)
    assert found == Trainer().validate(Classifier(), loader(12), ckpt_path=expected.best_model_path)


class Gone(FileCheckpointIO):
    """Cannot save."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str) -> None:
        raise ConnectionError("the service is gone")


def cannot_save(rank: int, folder: Path) -> None:
    keeper = ModelCheckpoint(folder, every_n_train_steps=1)
    trainer(callbacks=keeper, checkpoint_io=Gone()).fit(Classifier(), list(loader(6 * rank, 6)))


def test_all_ranks_end_if_one_cannot_save(ending: Ending, tmp_path: Path) -> None:
    """Rank 0 has no data, so rank 1 saves."""
    ends = ending.ends(cannot_save, tmp_path, ranks=3)
    assert_blamed([end.error for end in ends], 1, "ConnectionError: the service is gone")


def test_wrong_objects(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"checkpoint_io=5 lacks a method\. .*\[J712\]"):
        Trainer(checkpoint_io=5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"no argument 'plugins'\. .*checkpoint_io.*'join'"):
        Trainer(plugins=[])  # pyright: ignore[reportArgumentType]


class WithSyncNorm(Classifier):
    """A module that communicates in training_step."""

    def __init__(self) -> None:
        super().__init__()
        self.body[1] = CPUSyncBatchNorm(8)

    def setup(self, stage: str) -> None:
        self.patches = ExitStack()  # until the process ends
        self.patches.enter_context(sync_batch_norm_on_cpu())


def own_loop(rank: int, batches: int) -> Any:
    torch.manual_seed(0)
    with sync_batch_norm_on_cpu():
        model = DistributedDataParallel(WithSyncNorm().body)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Join([model, optimizer], divide_by_initial_world_size=False) as join:
            for x, y in join.iterate(list(loader(6 * batches, 6)) if rank else [], weigh=lambda batch: len(batch[0])):
                optimizer.zero_grad()
                join.scale(torch.nn.functional.cross_entropy(model(x), y)).backward()
                optimizer.step()
    return [each.detach().clone() for each in model.module.state_dict().values()]


def test_sync_batch_norm_is_refused_with_a_way_that_works(pool: Pool) -> None:
    with pytest.raises(ValueError, match=r"SyncBatchNorm \('trained\.body\.1'\).* loop over join\.iterate\. \[J104\]"):
        Trainer(devices=2).fit(WithSyncNorm(), loader(6))
    alone = WithSyncNorm().body
    alone[1] = torch.nn.BatchNorm1d(8)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for x, y in loader(12, 6):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(alone(x), y).backward()
        optimizer.step()
    for found in pool.run(own_loop, 2, ranks=2):
        assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(found, alone.state_dict().values(), strict=True))

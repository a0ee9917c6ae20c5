"""Sharded checkpoints: written by some ranks and read by others, and what failures and kills leave."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils import _pytree as pytree

from join.collectives import SingleCollective, collective_of, run_threads
from joinables.trainer.checkpoints import sharded as module
from joinables.trainer.checkpoints.sharded import read_sharded, write_sharded
from joinables.trainer.launch.environment import LocalEnvironment
from joinables.trainer.launch.errors import WorkerDied
from joinables.trainer.launch.launcher import Launcher
from tests.joinables.trainer.test_checkpoint import damaged
from tests.pool import Pool


def names(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


# -- a sharded model


class Net:
    """A sharded MLP and its optimizer. No size divides evenly, and of the last bias only rank 0 has anything."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
        for part in (self.model[0], self.model[2], self.model):
            fully_shard(part, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        torch.manual_seed(dist.get_rank())
        self.model(torch.randn(4, 5)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def full(self) -> Any:
        """The whole state, with plain tensors."""
        return pytree.tree_map_only(DTensor, lambda each: each.full_tensor(), self.state())


def trains_and_writes(rank: int, path: str) -> Any:
    net = Net(seed=1)
    for epoch in range(3):  # each but the first replaces one
        net.step()
        write_sharded({**net.state(), "epoch": epoch, "names": ["a", "b"]}, path, collective_of(None))
    return net.full()


def reads(rank: int, path: str) -> Any:
    net = Net(seed=2)
    state = {**net.state(), "epoch": None, "names": []}
    read_sharded(state, path, collective_of(None))
    assert (state["epoch"], state["names"]) == (2, ["a", "b"])
    net.load(state)
    return net.full()


def same(one: Any, other: Any) -> bool:
    """Whether they are equal, bit for bit."""
    (leaves, form), (others, other_form) = pytree.tree_flatten(one), pytree.tree_flatten(other)
    pairs = zip(leaves, others, strict=True)
    return form == other_form and all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def test_any_number_of_ranks_reads_what_two_wrote(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "new" / "checkpoint"
    written = pool.run(trains_and_writes, str(path), ranks=2)[0]
    assert written["optimizer"]["state"]["0.weight"]["exp_avg"].any()
    assert names(path.parent) == {"checkpoint"}
    assert path.stat().st_mode & 0o777 == path.parent.stat().st_mode & 0o777  # the usual permissions
    for ranks in (1, 2, 3):
        for read in pool.run(reads, str(path), ranks=ranks):
            assert same(read, written)
    alone = {"model": {"0.weight": torch.zeros(7, 5)}}
    read_sharded(alone, path, SingleCollective())
    assert torch.equal(alone["model"]["0.weight"], written["model"]["0.weight"])


# -- failures


def sharded(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"value": value, "data": distribute_tensor(torch.full((1001,), value), mesh, [Shard(0)])}


def value_at(path: Path) -> float:
    state = {"value": 0.0, "data": torch.zeros(1001)}
    read_sharded(state, path, SingleCollective())
    assert bool((state["data"] == state["value"]).all())
    return state["value"]


class Unsendable(Exception):
    """Can neither be pickled, nor be made again from its args."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{reason} ({code})")
        self.lock = threading.Lock()


class FullDisk:
    def __reduce__(self) -> Any:
        raise OSError(28, "No space left on device")


def fails(rank: int, path: str) -> list[str]:
    collective = collective_of(None)
    write_sharded(sharded(1.0), path, collective)
    told: list[str] = []

    def failing(state: dict[str, Any]) -> None:
        with pytest.raises(RuntimeError) as caught:
            write_sharded(state, path, collective)
        told.append(str(caught.value))
        assert len(set(collective.all_gather_object(told[-1]))) == 1

    failing(sharded(2.0) | {"lock": threading.Lock()})
    failing(sharded(2.0) | {"full": FullDisk()})
    with pytest.MonkeyPatch.context() as patch:
        write = module.dcp.FileSystemWriter.write_data

        def write_data(self: Any, plan: Any, planner: Any) -> Any:
            if rank == collective.world_size - 1:
                raise Unsendable(7, reason="no luck")
            return write(self, plan, planner)

        patch.setattr(module.dcp.FileSystemWriter, "write_data", write_data)
        failing(sharded(2.0))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:  # another machine, whose disk is its own
            patch.setattr(module.Path, "stat", lambda self, **_: (_ for _ in ()).throw(FileNotFoundError("no part")))
        failing(sharded(2.0))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(module, "_put_in_place", lambda part, place: os.rename(part / "nothing", place))
        failing(sharded(2.0))
    return told


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_write_that_fails_on_one_rank_raises_on_all_and_leaves_the_old_one(
    pool: Pool, tmp_path: Path, ranks: int
) -> None:
    path = tmp_path / "checkpoint"
    lock, full, own, disk, rename = pool.run(fails, str(path), ranks=ranks)[0]
    assert lock.startswith(f"cannot write {str(path)!r}: rank ")
    assert "TypeError: cannot pickle '_thread.lock' object" in lock
    assert "OSError: [Errno 28] No space left on device" in full
    assert f": rank {ranks - 1}: Unsendable: no luck (7)" in own
    assert "whose file system all ranks have to share: rank 1: FileNotFoundError: no part" in disk
    assert ": rank 0: FileNotFoundError: " in rename
    assert value_at(path) == 1.0
    assert names(tmp_path) == {"checkpoint"}


def reads_what_is_not_there(rank: int, folder: str) -> None:
    collective, path = collective_of(None), Path(folder) / "checkpoint"
    with pytest.raises(FileNotFoundError, match="there is no such checkpoint"):
        read_sharded({}, path, collective)
    write_sharded(sharded(1.0), path, collective)
    with pytest.raises(RuntimeError, match=r"cannot read .*rank 0: .*Missing key in checkpoint state_dict: more"):
        read_sharded(sharded(0.0) | {"more": 1}, path, collective)
    with pytest.raises(RuntimeError, match="rank 1: ValueError: Size mismatch"):
        read_sharded({"data": torch.zeros(7)}, path, collective)
    if rank == 0:
        (path / "__0_0.distcp").unlink()
    collective.barrier()
    with pytest.raises(RuntimeError, match="rank 0: FileNotFoundError: "):
        read_sharded(sharded(0.0), path, collective)


def test_reading_what_is_not_there(pool: Pool, tmp_path: Path) -> None:
    pool.run(reads_what_is_not_there, str(tmp_path), ranks=2)


def writes_and_reads_damaged(rank: int, path: str) -> None:
    collective = collective_of(None)
    write_sharded(sharded(1.0), path, collective)
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):  # each is checked by one rank
        file = Path(path, name)
        written = file.read_bytes()
        collective.barrier()
        if rank == 0:
            file.write_bytes(written[:-1])
        collective.barrier()
        state = sharded(0.0)
        with pytest.raises(ValueError, match=f"cannot read {path!r}: {str(file)!r} has changed since it was written"):
            read_sharded(state, path, collective)
        assert state["value"] == 0.0 and not state["data"].to_local().any()
        if rank == 0:
            file.write_bytes(written)
        collective.barrier()


def test_changed_bytes_are_found(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    pool.run(writes_and_reads_damaged, str(path), ranks=2)
    for file in path.iterdir():
        written = file.read_bytes()
        for changed in damaged(written):
            file.write_bytes(changed)
            with pytest.raises(ValueError, match=re.escape(repr(str(file)))):
                read_sharded({}, path, SingleCollective())
        file.write_bytes(written)
    state = {"value": 0.0, "data": torch.zeros(1001)}
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        dcp.load(state, checkpoint_id=path, no_dist=True)  # also without us
    assert bool((state["data"] == state["value"]).all()) and state["value"] == 1.0


def test_nothing_but_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "precious").touch()
    (tmp_path / "file").touch()
    for name in ("results", "file"):
        with pytest.raises(RuntimeError, match=r"FileExistsError: .* is there and no checkpoint"):
            write_sharded({"value": 1}, tmp_path / name, SingleCollective())
    assert names(tmp_path) == {"results", "file"}
    assert names(tmp_path / "results") == {"precious"}


def test_ranks_that_torch_does_not_connect(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"need torch.distributed between ranks, not ThreadCollective"):
        run_threads(2, lambda collective: write_sharded({}, tmp_path / "checkpoint", collective))


# -- kills


def killed(path: str, moment: str) -> None:
    def kill(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    rename = Path.rename

    def kill_before_second(self: Path, target: Path) -> Any:
        return kill() if self.suffix == ".part" else rename(self, target)

    collective = collective_of(None)
    write_sharded(sharded(1.0), path, collective)
    if moment == "writing" and collective.rank == 1:
        module.dcp.FileSystemWriter.write_data = kill  # type: ignore[method-assign]
    if moment == "finishing":
        module.dcp.FileSystemWriter.finish = kill  # type: ignore[method-assign]
    if moment == "renaming":
        Path.rename = kill_before_second  # type: ignore[method-assign]
    if moment == "removing":
        shutil.rmtree = kill  # type: ignore[assignment]
    write_sharded(sharded(2.0), path, collective)


def write_once(path: str, value: float) -> None:
    write_sharded(sharded(value), path, collective_of(None))


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # Python 3.12; nothing is done on other threads
@pytest.mark.parametrize(
    ("moment", "rank", "found"),
    [("writing", 1, 1.0), ("finishing", 0, 1.0), ("renaming", 0, 1.0), ("removing", 0, 2.0)],
)
def test_killed_at_any_moment(moment: str, rank: int, found: float, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    launcher = Launcher(2, environment=LocalEnvironment(), start_method="fork")
    with pytest.raises(WorkerDied, match=f"rank {rank} was killed by SIGKILL"):
        launcher.launch(killed, str(path), moment)
    assert path.exists() == (moment != "renaming")
    assert (tmp_path / ".checkpoint.old").exists() == (moment in ("renaming", "removing"))
    assert value_at(path) == found
    (tmp_path / f".checkpoint.other.{'0' * 32}.part").touch()  # somebody else's
    launcher.launch(write_once, str(path), 3.0)
    assert value_at(path) == 3.0
    assert names(tmp_path) == {"checkpoint", f".checkpoint.other.{'0' * 32}.part"}

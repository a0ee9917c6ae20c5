"""What ranks do that end badly: how a block is used, and what goes wrong in it on rank 1."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from join import Join
from joinables.trainer import DDPStrategy, Trainer, TrainModule
from tests.ending import say

COUNTS = (6, 4, 0)  # batches by rank; the last one has no data
FAILS, AT = 1, 2  # which rank, and in which of its steps
WIDTH = 30


class Cell(NamedTuple):
    """One way to end.

    Attributes:
        mode: how the block is used.
        how: what goes wrong.
        memory: whether headers go through shared memory.
        timeout: as given to ``Join``.
    """

    mode: str
    how: str
    memory: bool
    timeout: float | None

    def __str__(self) -> str:
        return f"{self.mode}-{self.how}-{'memory' if self.memory else 'group'}-{self.timeout or 'patient'}"


ITERATES = ("iterate", "fully_shard")
"""Modes of a loop over ``join.iterate``."""
MODES = ("plain", "iterate", "fully_shard", "fit")
HOWS = (
    *("loader", "forward", "backward", "hook", "step"),
    *("sys.exit", "os._exit", "SIGKILL", "KeyboardInterrupt", "break", "left out"),
)

OWN = {
    "loader": "OSError: disk",
    "forward": "ValueError: in forward",
    "backward": "MemoryError: in backward",
    "hook": "ArithmeticError: in the comm hook",
    "step": "LookupError: in the step",
    "sys.exit": "SystemExit: 3",
    "KeyboardInterrupt": "KeyboardInterrupt",
    "break": "ProtocolError: Rank 1 ",
    "left out": "ProtocolError: Rank 1 skipped ",
}


def exists(cell: Cell) -> bool:
    """Whether there is such a cell."""
    if cell.mode in ITERATES:
        return cell.how != "hook" or cell.mode != "fully_shard"
    # Ranks may leave plain loops when they like; there are no dummies there.
    return cell.how not in ("break", "left out")


class Fragile(torch.autograd.Function):
    """Raises in the backward, when told to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, broken: bool) -> torch.Tensor:
        ctx.broken = broken
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.broken:
            raise MemoryError("in backward")
        return gradients[0], None


class Net(nn.Module):
    """Three layers, each in a bucket of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.broken = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at, layer in enumerate(self.layers):
            x = layer(x)
            if at == 1:
                if self.broken == "forward":
                    raise ValueError("in forward")
                x = Fragile.apply(x, self.broken == "backward")
        return x


class Trouble:
    """Brings about what goes wrong, on the rank where it does.

    Args:
        rank: this rank.
        how: what goes wrong.
        net: the model.
    """

    def __init__(self, rank: int, how: str, net: Net) -> None:
        self.how, self._net = how if rank == FAILS else "", net
        self.reached = False

    def comes(self, step: int) -> bool:
        """A step begins; whether it is the one in which something goes wrong."""
        self.reached = bool(self.how) and step == (COUNTS[FAILS] if self.how == "left out" else AT)  # with a dummy
        if self.reached:
            say("failed", time.time())
            self._net.broken = self.how
            if self.how == "sys.exit":
                raise SystemExit(3)
            if self.how == "os._exit":
                os._exit(7)
            if self.how == "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "KeyboardInterrupt":
                if signal.getsignal(signal.SIGINT) is not signal.SIG_DFL:  # which ends the trainer's workers at once
                    signal.raise_signal(signal.SIGINT)
                raise KeyboardInterrupt
        return self.reached

    def loader(self, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(count)
        for step in range(count):
            if self.how == "loader" and step == AT:
                say("failed", time.time())
                raise OSError("disk")
            yield torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)

    def hook(self, state, bucket):  # type: ignore[no-untyped-def]  # DDP takes no annotations that are texts
        """A comm hook."""
        if self.how == "hook" and self.reached and bucket.index() == 1:
            raise ArithmeticError("in the comm hook")
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0])

    def stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Comes before the optimizer's step."""
        if self.how == "step" and self.reached:
            raise LookupError("in the step")


def wrapped(net: Net, cell: Cell, trouble: Trouble) -> Any:
    if cell.mode == "fully_shard":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in net.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(net, mesh=mesh)
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.002)
    if cell.how == "hook":
        ddp.register_comm_hook(None, trouble.hook)
    return ddp


def train(rank: int, cell: Cell) -> None:
    torch.manual_seed(0)
    net = Net()
    trouble = Trouble(rank, cell.how, net)
    model = wrapped(net, cell, trouble)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.register_step_pre_hook(trouble.stepping)
    with Join([model, optimizer], divide_by_initial_world_size=False, timeout=cell.timeout) as block:
        loader = trouble.loader(COUNTS[rank])
        for step, (x, y) in enumerate(block.iterate(loader) if cell.mode in ITERATES else loader):
            if trouble.comes(step) and cell.how == "break":
                break
            if trouble.reached and cell.how == "left out":
                continue
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            (block.scale(loss) if cell.mode in ITERATES else loss).backward()
            optimizer.step()


def main(rank: int, cell: Cell) -> None:
    train(rank, cell)
    say("fine", True)


# -- the trainer: ranks are its workers, and the judge sees what leaves ``fit`` ----------------------------------------


class Samples:
    """A data set of which one sample cannot be read."""

    def __init__(self, broken: bool) -> None:
        self._broken = broken

    def __len__(self) -> int:
        return 10

    def __getitem__(self, at: int) -> torch.Tensor:
        if self._broken and at == FAILS + 3 * AT:
            say("failed", time.time())
            raise OSError("disk")
        return torch.full((WIDTH,), float(at))


class Module(TrainModule):
    """The same model for the trainer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.net = Net()
        self.trouble = Trouble(FAILS, how, self.net)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_rank == FAILS:
            self.trouble.comes(batch_idx)
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters())
        optimizer.register_step_pre_hook(self.trouble.stepping)
        return optimizer


def fit(rank: int, cell: Cell) -> None:
    """One process, which starts the ranks."""
    module = Module(cell.how)
    hook = {"ddp_comm_hook": module.trouble.hook} if cell.how == "hook" else {}
    strategy = DDPStrategy("fork", bucket_cap_mb=0.002, timeout=cell.timeout, **hook)  # pyright: ignore[reportArgumentType]
    trainer = Trainer(devices=3, accelerator="cpu", strategy=strategy, logger=False)
    trainer.fit(module, DataLoader(Samples(cell.how == "loader"), batch_size=1))  # pyright: ignore[reportArgumentType]

"""Tests on the ranks of PyTorch/XLA, on the CPU: ``python -m tests.xla.run 1``, or ``2`` for two ranks.

``torch_xla.launch`` runs several ranks of the CPU as threads of a process, each with a device and with programs of its
own. Processes that are started otherwise are one rank each (pytorch/xla issues 9089 and 9496). On a CPU, an operation
meets only operations of the same program, unless it names a channel. So with several ranks, all operations here are
gathers that name a channel. XLA ends the process 10 s after an operation that does not meet.

The trainer refuses ranks that are threads. With ``2 processes``, two processes have a device each, and gloo gathers.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("PJRT_DEVICE", "CPU")

import pytest
import torch
import torch.distributed as dist
import torch_xla  # pyright: ignore[reportMissingImports]
import torch_xla.core.xla_model as xm  # pyright: ignore[reportMissingImports]
import torch_xla.runtime  # pyright: ignore[reportMissingImports]

from join.collectives import Collective
from join.collectives.xla import XLACollective
from joinables.trainer import Trainer
from joinables.trainer.launch import Launcher, Place
from tests.conformance.collective_suite import (
    CHECKS_OVER_LIBRARY,
    check_over_library,
    fails,
    refuses_ddp,
    samples,
    times_out,
)
from tests.examples import examples_of
from tests.joinables.trainer.modules import Classifier, loader
from tests.joinables.trainer.other_library import OPTIONS, check_trainer

HANGS_AFTER_SECONDS = 600
REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    xm.REDUCE_SUM: lambda rows: rows.sum(0, dtype=rows.dtype),
    xm.REDUCE_MIN: lambda rows: rows.amin(0),
    xm.REDUCE_MAX: lambda rows: rows.amax(0),
}
_gather = xm.all_gather


def gather_by_channel(value: torch.Tensor, dim: int = 0, pin_layout: bool = False) -> torch.Tensor:
    everyone = [list(range(torch_xla.runtime.world_size()))]
    return _gather(value, dim, everyone, pin_layout=pin_layout, channel_id=1, use_global_device_ids=True)


def gather_by_gloo(value: torch.Tensor, dim: int = 0, pin_layout: bool = False) -> torch.Tensor:
    own = value.cpu()
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return torch.cat(parts, dim).to(value.device)


def reduce_by_gather(kind: str, value: torch.Tensor) -> torch.Tensor:
    return REDUCTIONS[kind](xm.all_gather(value[None]))


def on_device(collective: Collective) -> None:
    """Tensors on the device stay there."""
    rank, size = collective.rank, collective.world_size
    device = torch_xla.device()
    tensor = torch.tensor([rank, 2.0], device=device)
    collective.all_reduce(tensor).wait()
    assert tensor.device == device and tensor.tolist() == [sum(range(size)), 2.0 * size]
    collective.broadcast(tensor.fill_(rank), size - 1).wait()
    assert tensor.tolist() == [size - 1, size - 1]
    outputs = [torch.zeros(2, device=device) for _ in range(size)]
    collective.all_gather(tensor.fill_(rank), outputs).wait()
    assert [output.tolist() for output in outputs] == [[each, each] for each in range(size)]


def the_page(collective: Collective) -> None:
    """The lines of ``docs/engines.md``, on devices. Of several ranks, the first has no data."""
    rank, size = collective.rank, collective.world_size
    batches = [samples(each, 3 * each if size > 1 else 3) for each in range(size)]
    model, alone = [torch.nn.Linear(2, 1, dtype=torch.float64) for _ in range(2)]
    for module in (model, alone):
        for parameter in module.parameters():
            torch.nn.init.constant_(parameter, 0.5)
    model.to("xla")
    optimizer, sgd = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, alone)]
    loss_fn = torch.nn.functional.mse_loss
    [example] = (each for each in examples_of("engines.md") if "torch_xla" in each.code)
    names: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": batches[rank], "loss_fn": loss_fn}
    exec(example.code, names)
    names["train"](rank)
    for step in range(max(map(len, batches))):
        x, y = map(torch.cat, zip(*(each[step] for each in batches if step < len(each)), strict=True))
        sgd.zero_grad()
        loss_fn(alone(x), y).backward()
        sgd.step()
    torch.testing.assert_close([parameter.cpu() for parameter in model.parameters()], list(alone.parameters()))


def the_trainer(collective: Collective) -> None:
    check_trainer(collective, "xla")


def refuses_the_trainer(_: Collective) -> None:
    """Ranks that are threads."""
    with pytest.raises(ValueError, match="J880"):
        Trainer(strategy="xla", **OPTIONS).fit(Classifier(), loader())


ENDS = {check.__name__: check for check in (fails, times_out)}
"""Each needs a process of its own, in which an operation of the rank that waited stays behind."""


def run(index: int, end: str) -> None:
    """Run checks on a rank."""
    faulthandler.dump_traceback_later(HANGS_AFTER_SECONDS, exit=True)
    torch.set_num_threads(1)
    place = XLACollective(), torch_xla.runtime.global_ordinal(), torch_xla.runtime.world_size()
    checks = [*CHECKS_OVER_LIBRARY, on_device, the_page, the_trainer]
    if place[-1] > 1:
        xm.all_gather, xm.all_reduce = gather_by_channel, reduce_by_gather
        # The ranks are threads of a process, which has one process group.
        checks = [refuses_the_trainer if check is the_trainer else check for check in checks if check != refuses_ddp]
    if end:
        check_over_library(*place, ENDS[end])
    else:
        check_over_library(*place, *checks, times=2)


def run_process(place: Place) -> None:
    """Run checks on a rank that is a process with a device of its own."""
    faulthandler.dump_traceback_later(HANGS_AFTER_SECONDS, exit=True)
    runtime: Any = torch_xla.runtime
    runtime.global_ordinal = runtime.local_ordinal = lambda: place.rank
    runtime.world_size = lambda: place.world_size
    xm.all_gather, xm.all_reduce = gather_by_gloo, reduce_by_gather
    check_over_library(XLACollective(), place.rank, place.world_size, on_device, the_page, the_trainer)


def main(ranks: str, end: str = "") -> None:
    if end == "processes":
        Launcher(int(ranks)).launch(run_process, Place)
        return
    os.environ["CPU_NUM_DEVICES"] = ranks
    torch_xla.launch(run, args=(end,))


if __name__ == "__main__":
    main(*sys.argv[1:])

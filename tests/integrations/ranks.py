"""Ranks of Accelerate: each is a process of the pool, with the process group that it has."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch.distributed as dist


def imported(name: str) -> Any:
    """A module of theirs, which is not installed everywhere."""
    return import_module(name)


@contextmanager
def launched(**variables: str) -> Iterator[None]:
    """As a launcher of Accelerate's would have it, on the CPU; what Accelerate keeps of it is forgotten at the end."""
    state = imported("accelerate.state")
    told = {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **variables}
    if dist.is_initialized():
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        told |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    before = dict(os.environ)
    os.environ.update(told)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # theirs
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
        state.PartialState._reset_state()


def accelerator(*, fsdp: int | None = None, **arguments: Any) -> Any:
    """An ``Accelerator`` of this rank; ``fsdp`` is the version of FSDP that it shards with."""
    made = imported("accelerate").Accelerator(cpu=True, **arguments)
    if fsdp is not None:
        shard(fsdp)
    return made


def shard(version: int) -> None:
    """Have the accelerator that there is shard with FSDP, of which Accelerate takes no notice on the CPU."""
    library, utils = imported("accelerate.state"), imported("accelerate.utils")
    plugin = utils.FullyShardedDataParallelPlugin(fsdp_version=version, cpu_ram_efficient_loading=False)
    for state in (library.PartialState, library.AcceleratorState):  # the one takes over from the other
        state._shared_state["distributed_type"] = utils.DistributedType.FSDP
    library.AcceleratorState._shared_state["fsdp_plugin"] = plugin

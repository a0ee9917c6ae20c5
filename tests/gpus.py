"""Devices of ranks: each rank has one of its own, or all share one."""

from __future__ import annotations

import os

import torch


def device_of_rank(kind: str, backend: str, rank: int) -> torch.device:
    """The device of a rank: with gloo the first one for all ranks, else one of its own, or the last one there is."""
    return torch.device(kind, 0 if backend == "gloo" else min(rank, torch.accelerator.device_count() - 1))


def gpu_of(rank: int) -> torch.device:
    """The GPU that NCCL uses in this process, to be called before its process group is made.

    NCCL refuses two ranks of one host on one GPU. On a machine with a single GPU, each rank therefore claims to be a
    host of its own, and what they send to each other goes over sockets.
    """
    if torch.cuda.device_count() == 1:
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"
    return device_of_rank("cuda", "nccl", rank)

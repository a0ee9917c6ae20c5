"""GPUs of ranks under NCCL: each rank has one of its own, or all share the only one."""

from __future__ import annotations

import os

import torch


def gpu_of(rank: int) -> torch.device:
    """The GPU that NCCL uses in this process, to be called before its process group is made.

    NCCL refuses two ranks of one host on one GPU. On a machine with a single GPU, each rank therefore claims to be a
    host of its own, and what they send to each other goes over sockets.
    """
    if torch.cuda.device_count() > 1:
        return torch.device("cuda", rank)
    os.environ["NCCL_HOSTID"] = f"rank-{rank}"
    return torch.device("cuda", 0)

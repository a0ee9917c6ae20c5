"""torch's SyncBatchNorm where there is no GPU: all of it but its kernels, which torch has for GPUs only."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override


class CPUSyncBatchNorm(torch.nn.SyncBatchNorm):
    """A SyncBatchNorm of ``[batch, features]`` on the CPU; to be run inside :func:`sync_batch_norm_on_cpu`."""

    @override
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "cpu")  # one of the devices that it takes
            return super().forward(input)


@contextmanager
def sync_batch_norm_on_cpu() -> Generator[None]:
    """Within the context, there are the kernels, and DDP takes such a module."""
    with pytest.MonkeyPatch.context() as patch:
        for kernel in (_stats, _gather_stats_with_counts, _elemt, _backward_reduce, _backward_elemt):
            patch.setattr(torch, f"batch_norm{kernel.__name__}", kernel)
        patch.setattr(DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda *args: None)
        yield


def _stats(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x.mean(0), (x.var(0, unbiased=False) + eps).rsqrt()


def _gather_stats_with_counts(
    x: torch.Tensor,
    means: Any,
    inverses: Any,
    running_mean: Any,
    running_var: Any,
    momentum: Any,
    eps: Any,
    counts: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    total, weights = counts.sum(), (counts / counts.sum()).unsqueeze(1)
    mean = (means * weights).sum(0)
    variance = ((inverses**-2 - eps + means**2) * weights).sum(0) - mean**2
    running_mean.lerp_(mean, momentum)
    running_var.lerp_(variance * total / (total - 1), momentum)
    return mean, (variance + eps).rsqrt()


def _elemt(x: torch.Tensor, weight: Any, bias: Any, mean: Any, inverse: Any, eps: float) -> torch.Tensor:
    return (x - mean) * inverse * weight + bias


def _backward_reduce(
    gradient: torch.Tensor, x: torch.Tensor, mean: Any, inverse: Any, weight: Any, *needed: bool
) -> tuple[torch.Tensor, ...]:
    total, product = gradient.sum(0), (gradient * (x - mean)).sum(0)
    return total, product, product * inverse, total


def _backward_elemt(
    gradient: torch.Tensor, x: torch.Tensor, mean: Any, inverse: Any, weight: Any, total: Any, product: Any, counts: Any
) -> torch.Tensor:
    centred = gradient - (total + (x - mean) * inverse**2 * product) / counts.sum()
    return centred * inverse * weight

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
    """A SyncBatchNorm on the CPU; to be run inside :func:`sync_batch_norm_on_cpu`."""

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


def _sum(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).flatten(1).sum(1)


def _like(x: torch.Tensor, *each: torch.Tensor) -> list[torch.Tensor]:
    """One number for each of the features of ``x``."""
    return [numbers.view(-1, *[1] * (x.dim() - 2)) for numbers in each]


def _stats(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    by_feature = x.transpose(0, 1).flatten(1)
    return by_feature.mean(1), (by_feature.var(1, unbiased=False) + eps).rsqrt()


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
    weight, bias, mean, inverse = _like(x, weight, bias, mean, inverse)
    return (x - mean) * inverse * weight + bias


def _backward_reduce(
    gradient: torch.Tensor, x: torch.Tensor, mean: Any, inverse: Any, weight: Any, *needed: bool
) -> tuple[torch.Tensor, ...]:
    total, product = _sum(gradient), _sum(gradient * (x - _like(x, mean)[0]))
    return total, product, product * inverse, total


def _backward_elemt(
    gradient: torch.Tensor, x: torch.Tensor, mean: Any, inverse: Any, weight: Any, total: Any, product: Any, counts: Any
) -> torch.Tensor:
    mean, inverse, weight, total, product = _like(x, mean, inverse, weight, total, product)
    return (gradient - (total + (x - mean) * inverse**2 * product) / counts.sum()) * inverse * weight

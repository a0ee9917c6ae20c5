"""Restoring the training or eval mode of modules: :func:`keeping_modes`."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def keeping_modes(module: torch.nn.Module) -> Generator[None]:
    """A context after which each part of ``module`` is in the mode that it was in before."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode

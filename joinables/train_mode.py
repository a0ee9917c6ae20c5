"""Keeping modules in the mode they are in, training or evaluation: :func:`keeping_modes`."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def keeping_modes(module: torch.nn.Module) -> Generator[None]:
    """Put each part of the module back into its own mode at the end."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode

"""Global settings of a process: :func:`capture`, :func:`restore`.

A forked process has the settings of the process that forked it. A process that is started in any other way begins with
the defaults, although statements under ``if __name__ == "__main__"`` of its script have changed them. So it receives
the settings of torch that change results.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from operator import attrgetter
from typing import Any

import torch

_NAMES = "default_device default_dtype deterministic_debug_mode float32_matmul_precision"
"""Settings that torch reads and changes by functions ``get_...`` and ``set_...``."""

_FLAGS = """
backends.cudnn.benchmark backends.cudnn.deterministic backends.mkldnn.deterministic
backends.cudnn.allow_tf32 backends.cuda.matmul.allow_tf32 backends.cuda.matmul.allow_fp16_accumulation
backends.cuda.matmul.allow_fp16_reduced_precision_reduction backends.cuda.matmul.allow_bf16_reduced_precision_reduction
backends.fp32_precision backends.cuda.matmul.fp32_precision backends.cudnn.fp32_precision
backends.cudnn.conv.fp32_precision backends.cudnn.rnn.fp32_precision backends.mkldnn.fp32_precision
backends.mkldnn.matmul.fp32_precision backends.mkldnn.conv.fp32_precision backends.mkldnn.rnn.fp32_precision
"""
"""Attributes of torch. Versions of torch may lack some of them."""


def _settings() -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], object]]]:
    """Yield the name of each setting of torch that changes results, and the functions that read and change it."""
    for name in _NAMES.split():
        yield name, getattr(torch, f"get_{name}"), getattr(torch, f"set_{name}")
    for path in _FLAGS.split():
        holder, _, name = path.rpartition(".")
        yield path, partial(attrgetter(path), torch), partial(_set, holder, name)


def _set(holder: str, name: str, value: Any) -> None:
    setattr(attrgetter(holder)(torch), name, value)


@contextmanager
def _quiet() -> Generator[None]:
    """Ignore warnings: torch 2.9 recommends other settings than the one that is read, which the user need not have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@_quiet()
def capture() -> dict[str, Any]:
    """Return the settings of this process as plain data."""
    values: dict[str, Any] = {}
    for name, get, _ in _settings():
        with suppress(AttributeError, RuntimeError):  # torch refuses to name the precision if several are set
            values[name] = get()
    return values


@_quiet()
def restore(settings: Mapping[str, Any]) -> None:
    """Give this process captured settings."""
    for name, get, change in _settings():
        with suppress(AttributeError, RuntimeError):
            if name in settings and get() != settings[name]:
                change(settings[name])

"""The random state of a process: :func:`capture`, :func:`restore`.

It is that of the generators of Python, torch, this process's GPU, and numpy if the program uses numpy. Captured states
are plain data and tensors, so that a checkpoint can hold them.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch


def seed_all(seed: int) -> None:
    """Start all generators from ``seed``."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def glance() -> dict[str, Any]:
    """The state of all generators, in the generators' own form: cheap enough for every step."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        state["numpy"] = _glance_at_numpy(sys.modules["numpy"].random)
    return state


def _glance_at_numpy(module: Any) -> Any:
    """Return ``numpy.random.get_state()``, the last one again if nothing was drawn since.

    It goes through the 624 words of the state one by one, which takes 45 us; a small training step takes 300, and
    comparing the words 2.
    """
    bits: Any = module.get_bit_generator() if hasattr(module, "get_bit_generator") else None
    if type(bits) is not module.MT19937:  # numpy before 1.24, or numpy.random.set_bit_generator was called
        return module.get_state()
    words = ctypes.string_at(bits.ctypes.state_address, 625 * 4)
    if words != _last_numpy[0]:
        state = module.get_state()
        # The words do not show whether a normal number is kept for the next draw: then the state is not kept.
        told = not state[3] and words == state[1].tobytes() + state[2].to_bytes(4, sys.byteorder)
        _last_numpy[:] = [words if told else None, state]
    return _last_numpy[1]


_last_numpy: list[Any] = [None, None]  # the words of numpy's generator when last looked at, and its state


def capture(seen: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The state of all generators, now or as :func:`glance` has ``seen`` it, as plain data and tensors."""
    state = dict(glance() if seen is None else seen)
    version, words, gauss = state["python"]
    state["python"] = [version, list(words), gauss]
    if "numpy" in state:
        kind, keys, *rest = cast("tuple[Any, ...]", state["numpy"])
        state["numpy"] = [kind, torch.tensor(keys.astype("int64")), *rest]
    return state


def restore(state: Mapping[str, Any]) -> None:
    """Put all generators into a captured state."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        kind, keys, *rest = state["numpy"]
        sys.modules["numpy"].random.set_state((kind, keys.numpy().astype("uint32"), *rest))


def start_from(state: Mapping[str, Any]) -> None:
    """Put the generators of a new process into the state that was captured in the process that started it."""
    restore(state)
    if "cuda" not in state:
        # That process has not used its GPU, which torch.manual_seed there would have seeded, too.
        torch.cuda.manual_seed_all(torch.initial_seed())


def iterate(loader: Any) -> Iterator[Any]:
    """Iterate over ``loader``; draws as many random numbers whether or not its workers are running already.

    A ``DataLoader`` draws a seed when it starts workers: with every iterator, or with ``persistent_workers`` with the
    first, which a fit that resumes has once more. What such workers draw themselves starts from a new seed then.
    """
    if not getattr(loader, "persistent_workers", False):
        return iter(loader)
    torch.empty((), dtype=torch.int64).random_()  # workers that are started in the next epoch get another seed
    state = torch.get_rng_state()
    try:
        return iter(loader)
    finally:
        torch.set_rng_state(state)

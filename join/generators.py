"""Global random generators of a process: :func:`capture`, :func:`restore`, and their copies at the end of a block.

These are the generators of Python, torch, this process's accelerator, and numpy if the program uses numpy. Captured
states are plain data and tensors, so that a checkpoint can contain them. Generators that a program has made itself are
its own matter.

Scripts often seed these generators alike on all ranks: for a permutation that they share out, or for the
numbers of a mixup. A rank that is out of data draws fewer numbers, or others, on dummies. Generators that were equal
when a block was entered are therefore equal when it is left. The digests travel in the row that ends a block::

    block in which a rank shadowed or ran a dummy     any other block
    ---------------------------------------------     ---------------
    row: digests on entering and on leaving           the same
    in the common copy: the states that were equal,   nothing: plain DDP would not change them either
    and are not any more, if there are any
"""

from __future__ import annotations

import ctypes
import logging
import random
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import torch

from join.collectives import Collective
from join.collectives._torch_private import one_reader
from join.transfer import Exchange

KINDS = ("python", "torch", "accelerator", "numpy")
_SIZE_OF_MT19937 = 4 * 625  # bytes: 624 numbers, and the position in them
_logger = logging.getLogger("join")

# While torch reads a state, it holds the generator's mutex, and makes a Python object. Before Python 3.12 this may
# collect garbage, so that another thread runs. If that thread reads the state, too, it waits for the mutex with the
# GIL, and the process hangs for good. So states are read by one thread at a time.


def used_accelerator() -> Any:
    """Return torch's module of the accelerator, such as ``torch.cuda``, or ``None`` if this process has not used it."""
    device = torch.accelerator.current_accelerator()
    module: Any = None if device is None else torch.get_device_module(device)
    return module if module is not None and getattr(module, "is_initialized", bool)() else None


def capture() -> dict[str, Any]:
    """Return the state of all generators as plain data and tensors; cheap enough for every step."""
    with one_reader:
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (module := used_accelerator()) is not None:
        state["accelerator"] = module.get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, torch.tensor(keys.astype("int64"), device="cpu"), *rest]
    return state


def restore(state: Mapping[str, Any]) -> None:
    """Put generators into captured states. A generator whose state is not given stays as it is."""
    if "python" in state:
        random.setstate(state["python"])
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "accelerator" in state and torch.accelerator.device_count():
        torch.get_device_module().set_rng_state(state["accelerator"])  # takes effect when the device is first used
    if "numpy" in state and "numpy" in sys.modules:
        kind, keys, *rest = state["numpy"]
        sys.modules["numpy"].random.set_state((kind, keys.numpy().astype("uint32"), *rest))


def digests_of_generators() -> list[int]:
    """Return a digest of 32 bits of each state, 0 for a generator that is not there. This takes 50 microseconds."""
    version, numbers, gauss = random.getstate()
    with one_reader:
        state = torch.get_rng_state()
    found = [crc32(array("I", numbers), crc32(repr((version, gauss)).encode())), _crc_of(state), 0, 0]
    if (module := used_accelerator()) is not None:
        found[2] = _crc_of(module.get_rng_state())
    if "numpy" in sys.modules:
        found[3] = _digest_of_numpy(sys.modules["numpy"].random)
    return found


_seen_of_numpy = b"", 0
"""The last state of numpy's generator and its digest, if it was one that a draw changes: reading a state takes long."""


def _digest_of_numpy(generator: Any) -> int:
    global _seen_of_numpy
    bits: Any = generator.get_bit_generator() if hasattr(generator, "get_bit_generator") else None
    is_usual = type(bits).__name__ == "MT19937"
    raw = ctypes.string_at(bits.ctypes.state_address, _SIZE_OF_MT19937) if is_usual else b""
    if not (raw and raw == _seen_of_numpy[0]):
        kind, keys, *rest = generator.get_state()
        found = crc32(keys, crc32(repr((kind, rest)).encode()))
        if not raw or rest[1]:  # half of the last draw is left, which the next draw takes without a change of the rest
            return found
        _seen_of_numpy = raw, found
    return _seen_of_numpy[1]


def _crc_of(state: torch.Tensor) -> int:
    return crc32(ctypes.string_at(state.data_ptr(), state.nbytes))  # a tensor has no buffer protocol of its own


def generators_apart(
    collective: Collective, entered: Sequence[Sequence[int]], left: Sequence[Sequence[int]], *, is_copied: bool
) -> list[str]:
    """Return the kinds of generators that were equal on entering a block, and are not any more; none after an even one.

    Generators that drift apart and are not copied are logged once.

    Args:
        collective: The ranks.
        entered: For each kind, the digests of all ranks on entering.
        left: The same on leaving.
        is_copied: Whether a rank shadowed or ran a dummy, so that generators are copied.
    """
    rows = list(zip(KINDS, entered, left, strict=True))
    before = {kind for kind, digests, _ in rows if len(set(digests)) == 1}
    after = {kind for kind, _, digests in rows if len(set(digests)) == 1}
    kept, apart = collective.kept, sorted(before - after)
    _log_once(collective, sorted(kept.generators - before), "between two Join blocks")
    kept.generators = before | after if is_copied else after
    if is_copied:
        return apart
    _log_once(collective, apart, "in a Join block in which all ranks had data to the end")
    return []


def _log_once(collective: Collective, kinds: Sequence[str], where: str) -> None:
    text = (
        f"The random generators of {' and '.join(kinds)} were equal on all ranks, and drew different numbers {where}."
        " Each rank keeps its own. If they have to be equal, seed them again, or draw alike on all ranks."
    )
    if kinds and where not in collective.kept.logged:
        collective.kept.logged.add(where)
        if collective.rank == 0:
            _logger.info(text)


def exchange_of_generators(kinds: Sequence[str], *, is_source: bool) -> Exchange:
    """Copy the generators of these kinds."""
    inbox = yield {kind: state for kind, state in capture().items() if kind in kinds} if is_source else {}
    states = inbox.fill(inbox.skeleton)
    yield ""
    if not is_source:
        restore(states)

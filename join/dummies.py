"""Batches without samples, for ranks that have none left: :func:`emptied`, and who cannot take them."""

from __future__ import annotations

import dis
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from join.batch import map_tensors

_RAISE = dis.opmap["RAISE_VARARGS"]


def emptied(batch: Any) -> Any:
    """Return ``batch`` with no samples in it: every tensor has length 0 along its first dimension.

    Containers, dataclasses and mappings of any depth keep their shape. Tensors without dimensions, and what is no
    tensor, stay as they are. No memory of the batch is held.
    """
    # A slice alone would keep the storage, and the graph of what the body has made of the batch.
    return map_tensors(_without_rows, batch)


def _without_rows(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() == 0:
        return tensor
    return tensor.detach()[:0].clone().requires_grad_(tensor.requires_grad)


def duplicate(batch: Any) -> Any:
    """The batch in containers of its own, with the tensors that it has: bodies take theirs apart."""
    try:
        return map_tensors(lambda tensor: tensor, batch)
    except Exception:  # of a container that cannot be built anew; then it is that one
        return batch


def cannot_take_empty(error: Exception, rank: int, listed: Sequence[Any]) -> str:
    """What to tell the user of an ``error`` that came of an empty batch: the rank, who raised, and the way out.

    Args:
        error: as caught; the innermost module in its traceback is taken for the one that raised.
        rank: this rank.
        listed: the objects of the block, of which modules are searched for the name of that one.

    Returns:
        A sentence or two; nothing if the error does not come of an empty batch: this package's own, that of a
        collective or of a file, and what a body raises by itself or by a mistake in it.
    """
    culprit: torch.nn.Module | None = None
    source, by_hand = "", False
    innermost = traceback = error.__traceback__
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            culprit = owner
        innermost, traceback = traceback, traceback.tb_next
    if innermost is not None:
        frame = innermost.tb_frame
        source = f"{frame.f_globals.get('__name__')}."
        by_hand = frame.f_code.co_code[innermost.tb_lasti] == _RAISE and not source.startswith("torch.")
    of_ours = source.startswith(("join.", "joinables.", "torch.distributed."))
    of_peers = isinstance(error, (OSError, dist.DistError)) or "third_party/gloo" in str(error)
    by_tensors = type(error) in (RuntimeError, ValueError, IndexError, ZeroDivisionError) and not by_hand
    if of_ours or of_peers or (culprit is None and not by_tensors):
        return ""
    where = "the loop's body"
    if culprit is not None:
        modules = [each for each in listed if isinstance(each, torch.nn.Module)]
        named = (cast("Iterable[tuple[str, torch.nn.Module]]", each.named_modules()) for each in modules)
        names = [name for each in named for name, module in each if module is culprit]
        where = f"{type(culprit).__name__}{f' ({names[0]!r})' if names and names[0] else ''}"
    return (
        f"rank {rank} had run out of batches and got an empty one, which {where} cannot take"
        f" ({type(error).__name__}: {error}). Give dummies with samples: join.iterate(loader, dummy='last')"
    )

"""Copying state from one rank to all, or from all to all: tensors travel as flat buffers, the rest is pickled.

Active and joined ranks run the same code here, so there is one order of collectives: for a tree, first its skeleton
(two broadcasts, or two all-gathers), then its tensors, chunk by chunk (or in one all-gather).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from join.collectives import Collective
from join.collectives._torch_private import pytree
from join.collectives.base import as_bytes
from join.errors import described

_CHUNK_BYTES = 64 * 2**20


@torch.no_grad()
def broadcast_tensors(collective: Collective, tensors: Sequence[torch.Tensor], source: int) -> None:
    """Overwrite ``tensors`` in place with those of rank ``source``; extra memory is one chunk of 64 MiB."""
    for chunk in _chunks(tensors):
        if len(chunk) == 1 and chunk[0].is_contiguous():
            collective.broadcast(chunk[0].detach(), source).wait()
            continue
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in chunk])
        collective.broadcast(flat, source).wait()
        if collective.rank != source:
            start = 0
            for tensor in chunk:
                tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
                start += tensor.numel()


def broadcast_tree(collective: Collective, tree: Any, source: int) -> Any:
    """Return rank ``source``'s ``tree`` (dicts, lists, tuples of tensors and picklable leaves) on every rank.

    Raises:
        RuntimeError: on every rank, if a leaf that is not a tensor cannot be pickled.
        TypeError: on every rank, if a container cannot be built without the tensors in it.
    """
    if collective.rank == source:
        tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        try:
            skeleton = pytree.tree_map_only(torch.Tensor, _Slot.of, tree)
        except Exception as error:  # some look at what they get, such as PackedSequence
            #: Give plain tensors in lists, tuples or dicts.
            refused = TypeError(f"something in it cannot be sent to other ranks: {described(error)} [J100]")
            collective.broadcast_object(refused, source)
            raise refused from error
        collective.broadcast_object(skeleton, source)
        broadcast_tensors(collective, tensors, source)
        return tree
    skeleton = collective.broadcast_object(None, source)
    if isinstance(skeleton, TypeError):
        raise skeleton
    received = [leaf.empty() for leaf in pytree.tree_leaves(skeleton) if isinstance(leaf, _Slot)]
    broadcast_tensors(collective, received, source)
    fill = iter(received)
    return pytree.tree_map_only(_Slot, lambda _: next(fill), skeleton)


@torch.no_grad()
def gather_trees(collective: Collective, tree: Any) -> list[Any]:
    """Return every rank's ``tree`` in rank order, on every rank; they may differ in shape. Tensors arrive on the CPU.

    Raises:
        RuntimeError: on every rank, if one has a leaf that is no tensor and cannot be pickled.
    """
    skeletons = collective.all_gather_object(pytree.tree_map_only(torch.Tensor, _Slot.of, tree))
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    flat = [as_bytes(tensor.detach().cpu().contiguous()) for tensor in tensors]
    received = collective.all_gather_uneven(torch.cat([torch.empty(0, dtype=torch.uint8), *flat]))
    return [_filled(skeleton, data) for skeleton, data in zip(skeletons, received, strict=True)]


def _filled(skeleton: Any, data: torch.Tensor) -> Any:
    start = 0

    def take(slot: _Slot) -> torch.Tensor:
        nonlocal start
        size = slot.shape.numel() * slot.dtype.itemsize
        start += size
        return data[start - size : start].clone().view(slot.dtype).view(slot.shape)  # cloned, so that it is aligned

    return pytree.tree_map_only(_Slot, take, skeleton)


@dataclass(frozen=True)
class _Slot:
    """Where a tensor belongs in a skeleton."""

    shape: torch.Size
    dtype: torch.dtype
    device: str

    @staticmethod
    def of(tensor: torch.Tensor) -> _Slot:
        return _Slot(tensor.shape, tensor.dtype, tensor.device.type)

    def empty(self) -> torch.Tensor:
        # The type alone names the receiver's own current device: "cuda" is cuda:1 on rank 1.
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def _chunks(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one dtype and device, up to the chunk size together."""
    chunk: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes == 0:
            continue
        fits = chunk and (tensor.dtype, tensor.device) == (chunk[0].dtype, chunk[0].device)
        if chunk and not (fits and size + nbytes <= _CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(tensor)
        size += nbytes
    if chunk:
        yield chunk

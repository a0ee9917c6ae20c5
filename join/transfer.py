"""Copying state from one rank to all, or from all to all: tensors travel as flat buffers, the rest is pickled.

Active and joined ranks run the same code here, so there is one order of collectives: for a tree, first its skeleton
(two broadcasts, or two all-gathers), then its tensors, chunk by chunk (or in one all-gather).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from join.collectives import Collective
from join.collectives._torch_private import pytree
from join.collectives.base import as_bytes
from join.errors import described

_CHUNK_BYTES = 64 * 2**20


@torch.no_grad()
def broadcast_tensors(
    collective: Collective,
    tensors: Sequence[torch.Tensor],
    source: int,
    *,
    keeps: bool = False,
    kinds: Sequence[int] | None = None,
) -> None:
    """Overwrite ``tensors`` in place with those of rank ``source``; extra memory is one chunk of 64 MiB.

    Args:
        collective: the group.
        tensors: of the same shapes and dtypes on all ranks.
        source: the rank whose tensors are sent.
        keeps: whether this rank leaves its tensors as they are, and only takes part.
        kinds: which tensors have a dtype and a device in common at ``source``, as numbers; without, those that have
            them in common here.
    """
    for chunk in _chunks(tensors, kinds):
        _broadcast_chunk(collective, chunk, source, keeps=keeps)


def _broadcast_chunk(collective: Collective, chunk: list[torch.Tensor], source: int, *, keeps: bool) -> None:
    if len(chunk) == 1 and chunk[0].numel() > 1 and chunk[0].is_contiguous() and not keeps:
        collective.broadcast(as_bytes(chunk[0]), source).wait()
        return
    sizes = [tensor.numel() for tensor in chunk]
    if collective.rank == source:
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in chunk])
    else:
        flat = chunk[0].new_empty(sum(sizes))
    collective.broadcast(as_bytes(flat), source).wait()
    if collective.rank != source and not keeps:
        parts = cast("Sequence[torch.Tensor]", flat.split(sizes))
        for tensor, part in zip(chunk, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


def broadcast_tree(collective: Collective, tree: Any, source: int, devices: Iterable[torch.device] = ()) -> Any:
    """Return rank ``source``'s ``tree`` (dicts, lists, tuples of tensors and picklable leaves) on every rank.

    Args:
        collective: the group.
        tree: on another rank, its own, if it has one: what is received goes into tensors of it that fit.
        source: the rank whose tree is sent.
        devices: those that this rank trains on, for tensors that are on no CPU at ``source``, and of which this rank
            has none that tells where; without, its current device.

    Raises:
        RuntimeError: on every rank, if a leaf that is not a tensor cannot be pickled.
        TypeError: on every rank, if a container cannot be built without the tensors in it.
    """
    skeleton, tensors = broadcast_skeleton(collective, tree, source)
    if collective.rank == source:
        broadcast_tensors(collective, tensors, source)
        return tree
    inbox = Inbox(devices=devices)
    filled = inbox.fill(skeleton, tree)
    inbox.receive(collective, source)
    return filled


def broadcast_skeleton(collective: Collective, tree: Any, source: int) -> tuple[Any, list[torch.Tensor]]:
    """Return rank ``source``'s ``tree`` on every rank, with a :class:`Slot` for each tensor in it.

    Returns:
        The skeleton; and on ``source`` the tensors, in the order of their slots.

    Raises:
        RuntimeError, TypeError: as :func:`broadcast_tree` does.
    """
    if collective.rank != source:
        skeleton = collective.broadcast_object(None, source)
        if isinstance(skeleton, TypeError):
            raise skeleton
        return skeleton, []
    try:
        skeleton, tensors = _skeleton_of(tree)
    except Exception as error:  # some look at what they get, such as PackedSequence
        #: Give plain tensors in lists, tuples or dicts.
        refused = TypeError(f"something in it cannot be sent to other ranks: {described(error)} [J100]")
        collective.broadcast_object(refused, source)
        raise refused from error
    collective.broadcast_object(skeleton, source)
    return skeleton, tensors


@torch.no_grad()
def gather_trees(collective: Collective, tree: Any) -> list[Any]:
    """Return every rank's ``tree`` in rank order, on every rank; they may differ in shape. Tensors arrive on the CPU.

    Raises:
        RuntimeError: on every rank, if one has a leaf that is no tensor and cannot be pickled.
    """
    skeleton, tensors = _skeleton_of(tree)
    skeletons = collective.all_gather_object(skeleton)
    flat = [as_bytes(tensor.detach().cpu().contiguous()) for tensor in tensors]
    received = collective.all_gather_uneven(torch.cat([torch.empty(0, dtype=torch.uint8, device="cpu"), *flat]))
    return [_filled(skeleton, data) for skeleton, data in zip(skeletons, received, strict=True)]


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in a skeleton.

    Attributes:
        number: counted from 0; a tensor that is in several places has one number.
        shape: of the tensor.
        dtype: of the tensor.
        device: the type alone: each rank has a device of its own.
        kind: a number, the same for tensors that have a dtype and a device in common.
    """

    number: int
    shape: torch.Size
    dtype: torch.dtype
    device: str
    kind: int


class Inbox:
    """Tensors that a rank receives those of a skeleton into.

    Args:
        keeps: whether the rank only takes part in the broadcast: then the tensors are empty shells without memory.
        devices: as of :func:`broadcast_tree`.
    """

    def __init__(self, *, keeps: bool = False, devices: Iterable[torch.device] = ()) -> None:
        self.keeps = keeps
        self._devices = {device.type: device for device in devices}
        self._tensors: dict[int, torch.Tensor] = {}  # by the numbers of their slots
        self._kinds: dict[int, int] = {}  # likewise

    def fill(self, skeleton: Any, own: Any = None, like: torch.Tensor | None = None) -> Any:
        """Return ``skeleton`` with tensors in its slots.

        Args:
            skeleton: of the sender's tree, or of a part of it.
            own: the same part of this rank's tree: tensors of it that fit their slots are taken. Others are on the same
                device, if its type is right.
            like: the parameter that the tensors belong to. They are on its device, but for those that are on the CPU at
                the sender; and where they have its shape, they are laid out in memory as it is.
        """
        own_at: dict[Any, Any] = dict(pytree.tree_flatten_with_path(own)[0])
        taken = {id(tensor) for tensor in self._tensors.values()}  # one that is in several places takes one tensor

        def place(path: Any, slot: Any) -> Any:
            if not isinstance(slot, Slot):
                return slot
            if slot.number not in self._tensors:
                held = own_at.get(path)
                device = self._devices.get(slot.device, torch.device(slot.device))
                if slot.device != "cpu" and like is not None:
                    device = like.device
                elif isinstance(held, torch.Tensor) and held.device.type == slot.device:
                    device = held.device
                wanted = slot.shape, slot.dtype, device
                shell = torch.empty((), dtype=slot.dtype, device=device).expand(slot.shape)
                if self.keeps:
                    tensor = shell
                elif (
                    isinstance(held, torch.Tensor)
                    and (held.shape, held.dtype, held.device) == wanted
                    and id(held) not in taken
                ):
                    tensor = held
                else:
                    base = shell if like is None or like.shape != slot.shape else like
                    tensor = torch.empty_like(base, dtype=slot.dtype, device=device)
                taken.add(id(tensor))
                self._tensors[slot.number], self._kinds[slot.number] = tensor, slot.kind
            return self._tensors[slot.number]

        return pytree.tree_map_with_path(place, skeleton)

    def receive(self, collective: Collective, source: int) -> None:
        """Receive what rank ``source`` sends by :func:`broadcast_tensors`."""
        tensors = [self._tensors[number] for number in sorted(self._tensors)]
        kinds = [self._kinds[number] for number in sorted(self._tensors)]
        broadcast_tensors(collective, tensors, source, keeps=self.keeps, kinds=kinds)


def _skeleton_of(tree: Any) -> tuple[Any, list[torch.Tensor]]:
    tensors: list[torch.Tensor] = []
    numbers: dict[int, int] = {}
    kinds: dict[tuple[torch.dtype, torch.device], int] = {}

    def slot(tensor: torch.Tensor) -> Slot:
        number = numbers.setdefault(id(tensor), len(tensors))
        if number == len(tensors):
            tensors.append(tensor)
        kind = kinds.setdefault((tensor.dtype, tensor.device), len(kinds))
        return Slot(number, tensor.shape, tensor.dtype, tensor.device.type, kind)

    return pytree.tree_map_only(torch.Tensor, slot, tree), tensors


def _filled(skeleton: Any, data: torch.Tensor) -> Any:
    start = 0
    tensors: dict[int, torch.Tensor] = {}  # by the numbers of their slots

    def take(slot: Slot) -> torch.Tensor:
        nonlocal start
        if slot.number not in tensors:
            size = slot.shape.numel() * slot.dtype.itemsize
            start += size
            # cloned, so that it is aligned
            tensors[slot.number] = data[start - size : start].clone().view(slot.dtype).view(slot.shape)
        return tensors[slot.number]

    return pytree.tree_map_only(Slot, take, skeleton)


def _chunks(tensors: Sequence[torch.Tensor], kinds: Sequence[int] | None) -> Iterator[list[torch.Tensor]]:
    """Tensors of one dtype and device, up to the chunk size together."""
    by_kind: dict[Any, list[torch.Tensor]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.numel():
            kind = (tensor.dtype, tensor.device) if kinds is None else kinds[index]
            by_kind.setdefault(kind, []).append(tensor)
    for same in by_kind.values():
        chunk: list[torch.Tensor] = []
        size = 0
        for tensor in same:
            nbytes = tensor.numel() * tensor.element_size()
            if chunk and size + nbytes > _CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
            chunk.append(tensor)
            size += nbytes
        yield chunk

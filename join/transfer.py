"""Copying state from one rank to all, or from all to all: tensors travel as bytes, the rest is pickled.

Active and joined ranks run the same code here, so there is one order of collectives. Tensors of one device are one
message, or several of 64 MiB each. State that is copied when an uneven block ends travels together
(:func:`copy_state`)::

    rank that is copied                              every other rank
    -------------------                              ----------------
    skeletons of all that is sent, and which         the same: two broadcasts
    tensors go together
    all-reduce: can all ranks copy it?               all-reduce
    one cannot: all-gather of reasons; all raise     the same
    tensors: one broadcast for each device           into tensors of its own, where these fit

A single tree is sent likewise, without the all-reduce. From all to all (:func:`gather_trees`), there is an all-gather
of skeletons, and another one of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, cast

import torch

from join.collectives import Collective
from join.collectives._torch_private import pytree
from join.collectives.base import as_bytes
from join.errors import JoinError, described

Tensors: TypeAlias = Sequence[torch.Tensor]
Layout: TypeAlias = Sequence[tuple[torch.device, int]]
"""Of each message the device, and how many bytes it has."""
_Plan: TypeAlias = Sequence[Sequence[int]]
"""Of each message the numbers of its tensors."""
_CHUNK_BYTES = 64 * 2**20


# -- tensors -----------------------------------------------------------------------------------------------------------


def broadcast_tensors(collective: Collective, tensors: Tensors, source: int) -> None:
    """Overwrite ``tensors`` in place with those of rank ``source``; extra memory is one chunk of 64 MiB.

    Args:
        collective: the group.
        tensors: of the same shapes and dtypes on all ranks.
        source: the rank whose tensors are sent.
    """
    _move(collective, _plan(tensors), tensors, source)


class OwnTensors:
    """Tensors that each rank has for itself, such as buffers: copied from one rank at the end of an even block.

    Whether all ranks have tensors of the same sizes is being compared meanwhile. So what is started before that has the
    sizes that were agreed on when the last such block ended, whatever this rank has now.

    Args:
        collective: the group.
        tensors: this rank's.
        source: the rank whose tensors are sent.
        agreed: the layout that was agreed on; empty if none was.
    """

    def __init__(self, collective: Collective, tensors: Tensors, source: int, agreed: Layout) -> None:
        self._collective, self._tensors, self._source = collective, tensors, source
        parcels = [_Parcel([tensors[number] for number in numbers]) for numbers in _plan(tensors)]
        self.layout = [(parcel.tensors[0].device, parcel.nbytes) for parcel in parcels]
        """That of this rank, to be agreed on; empty if it takes more than one chunk for a device."""
        if sum(nbytes for _, nbytes in self.layout) > _CHUNK_BYTES:
            self.layout = []
        self._ends: list[Callable[[], object]] = []
        self._is_started = bool(agreed) and self.layout == agreed
        if self._is_started:
            self._ends = [parcel.start(collective, source, aside=True) for parcel in parcels]
        else:
            for device, nbytes in agreed:
                nothing = torch.zeros(nbytes, dtype=torch.uint8, device=device)
                self._ends.append(collective.broadcast(nothing, source).wait)

    def receive(self) -> None:
        """Overwrite the tensors; called if all ranks have tensors of the same sizes."""
        for end in self._ends:
            end()
        if not self._is_started:
            broadcast_tensors(self._collective, self._tensors, self._source)


class _Parcel:
    """Tensors of one device that are one message. Those with the largest elements come first, so that all are aligned.

    Args:
        tensors: in that order.
        kept: the ``id`` of those that are left alone here, whatever arrives.
    """

    def __init__(self, tensors: Tensors, kept: Iterable[int] = ()) -> None:
        self.tensors, self._kept = tensors, set(kept)
        self._sizes = [tensor.nbytes for tensor in tensors]
        self.nbytes = sum(self._sizes)

    @torch.no_grad()
    def start(self, collective: Collective, source: int, *, aside: bool = False) -> Callable[[], object]:
        """Start to send or to receive; the function returned waits, and puts what was received into the tensors.

        Args:
            collective: the group.
            source: the rank that sends.
            aside: whether the tensors stay as they are until that function is called.
        """
        first = self.tensors[0]
        is_source = collective.rank == source
        in_place = is_source or not (aside or id(first) in self._kept)
        if len(self.tensors) == 1 and first.is_contiguous() and in_place:
            return collective.broadcast(as_bytes(first), source).wait
        flat = self.flat() if is_source else torch.empty(self.nbytes, dtype=torch.uint8, device=first.device)
        work = collective.broadcast(flat, source)
        return work.wait if is_source else lambda: (work.wait(), self.unpack(flat))

    def flat(self) -> torch.Tensor:
        """The tensors as bytes, one behind the other."""
        tensors = [as_bytes(tensor.detach().contiguous()) for tensor in self.tensors]
        return torch.cat([torch.empty(0, dtype=torch.uint8, device=tensors[0].device if tensors else "cpu"), *tensors])

    @torch.no_grad()
    def unpack(self, flat: torch.Tensor) -> None:
        """Put what :meth:`flat` has made into the tensors."""
        parts = cast("Sequence[torch.Tensor]", flat.split(self._sizes))
        for tensor, part in zip(self.tensors, parts, strict=True):
            if id(tensor) not in self._kept:
                tensor.copy_(part.view(tensor.dtype).view(tensor.shape))


def _plan(tensors: Tensors) -> _Plan:
    """Which tensors go together, by their positions: of one device, up to the chunk size."""
    devices: dict[torch.device, list[int]] = {}
    itemsizes = [tensor.itemsize for tensor in tensors]
    for number, tensor in enumerate(tensors):
        if tensor.numel():
            devices.setdefault(tensor.device, []).append(number)
    chunks: list[list[int]] = []
    for numbers in devices.values():
        size = _CHUNK_BYTES
        for number in sorted(numbers, key=itemsizes.__getitem__, reverse=True):
            nbytes = tensors[number].nbytes
            if size + nbytes > _CHUNK_BYTES:
                chunks.append([])
                size = 0
            chunks[-1].append(number)
            size += nbytes
    return chunks


# -- trees -------------------------------------------------------------------------------------------------------------


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
    skeletons, plan, tensors = _broadcast_skeletons(collective, [tree], source)
    inbox = Inbox(tree if collective.rank == source else skeletons[0], devices)
    filled = inbox.fill(inbox.skeleton, tree)
    _move(collective, plan, tensors or inbox.tensors, source)
    return filled


def _broadcast_skeletons(collective: Collective, trees: list[Any], source: int) -> tuple[list[Any], _Plan, Tensors]:
    """Return the skeletons of rank ``source``'s trees, which tensors go together, and, on ``source``, the tensors."""
    tensors: list[torch.Tensor] = []
    sent: Any = None
    if collective.rank == source:
        try:
            skeletons = [_skeleton_of(tree, tensors) for tree in trees]
            sent = skeletons, _plan(tensors)
        except Exception as error:  # some look at what they get, such as PackedSequence
            #: Give plain tensors in lists, tuples or dicts.
            sent = TypeError(f"something in it cannot be sent to other ranks: {described(error)} [J100]")
            sent.__cause__ = error
    received = collective.broadcast_object(sent, source)
    if isinstance(received, TypeError):
        raise received
    return *received, tensors


def _move(collective: Collective, plan: _Plan, tensors: Any, source: int, kept: Iterable[int] = ()) -> None:
    for numbers in plan:
        _Parcel([tensors[number] for number in numbers], kept).start(collective, source)()


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in a skeleton.

    Attributes:
        number: among all tensors that are sent; a tensor that is in several places of a tree has one number.
        shape: of the tensor.
        dtype: of the tensor.
        device: the type alone: each rank has a device of its own.
    """

    number: int
    shape: torch.Size
    dtype: torch.dtype
    device: str


class Inbox:
    """Tensors that a rank receives those of a skeleton into.

    Args:
        skeleton: of the sender's tree.
        devices: as of :func:`broadcast_tree`.

    Attributes:
        tensors: by the numbers of their slots.
        kept: the ``id`` of those that only take the place of what arrives: shells without memory.
    """

    def __init__(self, skeleton: Any, devices: Iterable[torch.device] = ()) -> None:
        self.skeleton = skeleton
        self.tensors: dict[int, torch.Tensor] = {}
        self.kept: set[int] = set()
        self._taken: set[int] = set()  # one that is in several places takes one tensor
        self._devices = {device.type: device for device in devices}

    def fill(self, skeleton: Any, own: Any = None, like: torch.Tensor | None = None, *, keeps: bool = False) -> Any:
        """Return ``skeleton`` with tensors in its slots, each of which has to be filled.

        Args:
            skeleton: of the sender's tree, or of a part of it.
            own: the same part of this rank's tree: tensors of it that fit their slots are taken. Others are on the same
                device, if its type is right.
            like: the parameter that the tensors belong to. They are on its device, but for those that are on the CPU at
                the sender; and where they have its shape, they are laid out in memory as it is.
            keeps: whether this rank keeps its own part, and only takes part in the broadcast.
        """
        own_at: dict[Any, Any] = dict(pytree.tree_flatten_with_path(own)[0])

        def place(path: Any, slot: Any) -> Any:
            if not isinstance(slot, Slot):
                return slot
            if slot.number not in self.tensors:
                held: Any = own_at.get(path)
                is_alike = isinstance(held, torch.Tensor) and held.device.type == slot.device
                device = self._devices.get(slot.device, torch.device(slot.device))
                if slot.device != "cpu" and like is not None:
                    device = like.device
                elif is_alike:
                    device = held.device
                wanted = slot.shape, slot.dtype, device
                shell = torch.empty((), dtype=slot.dtype, device=device).expand(slot.shape)
                if keeps:
                    tensor = shell
                    self.kept.add(id(tensor))
                elif is_alike and (held.shape, held.dtype, held.device) == wanted and id(held) not in self._taken:
                    tensor = held
                else:
                    base = shell if like is None or like.shape != slot.shape else like
                    tensor = torch.empty_like(base, dtype=slot.dtype, device=device)
                self._taken.add(id(tensor))
                self.tensors[slot.number] = tensor
            return self.tensors[slot.number]

        return pytree.tree_map_with_path(place, skeleton)


def _skeleton_of(tree: Any, tensors: list[torch.Tensor]) -> Any:
    """Return ``tree`` with a slot for each tensor in it, and add these to ``tensors``."""
    numbers: dict[int, int] = {}

    def slot(tensor: torch.Tensor) -> Slot:
        number = numbers.setdefault(id(tensor), len(tensors))
        if number == len(tensors):
            tensors.append(tensor)
        return Slot(number, tensor.shape, tensor.dtype, tensor.device.type)

    return pytree.tree_map_only(torch.Tensor, slot, tree)


# -- state at the end of a block ---------------------------------------------------------------------------------------

Exchange: TypeAlias = Generator[Any, Inbox, None]
"""One object's part in :func:`copy_state`.

It yields a tree, which is sent if this rank is the one that is copied. It gets an inbox with the skeleton of the tree
of that rank (on that rank itself, with the tree), fills it, and yields why this rank cannot copy the state, or "". When
all ranks can, it goes on once the tensors have arrived.
"""


def copy_state(
    collective: Collective, exchanges: Sequence[tuple[str, Exchange]], source: int, devices: Iterable[torch.device]
) -> None:
    """Copy the state of several objects from rank ``source``; the module's docstring has the order of collectives.

    Args:
        collective: the group.
        exchanges: of each object its name and its part.
        source: the rank that is copied.
        devices: as of :func:`broadcast_tree`.

    Raises:
        JoinError: on every rank, if one of them cannot copy the state of an object.
        RuntimeError, TypeError: as :func:`broadcast_tree` does.
    """
    parts = [part for _, part in exchanges]
    trees = [next(part) for part in parts]
    skeletons, plan, tensors = _broadcast_skeletons(collective, trees, source)
    inboxes = [Inbox(skeleton, devices) for skeleton in (trees if collective.rank == source else skeletons)]
    own: list[str] = [part.send(inbox) for part, inbox in zip(parts, inboxes, strict=True)]
    if collective.reduce_boolean_decision(any(own), all=False):
        ranks: list[list[str]] = collective.all_gather_object(own)
        _raise_not_copied([name for name, _ in exchanges], ranks)
    received = {number: tensor for inbox in inboxes for number, tensor in inbox.tensors.items()}
    kept = {number for inbox in inboxes for number in inbox.kept}
    _move(collective, plan, tensors or received, source, kept)
    for part in parts:
        next(part, None)


def _raise_not_copied(names: Sequence[str], ranks: Sequence[Sequence[str]]) -> NoReturn:
    """Raise the error for the first object whose state some ranks cannot copy."""
    reasons = [[f"on rank {rank}, {own[at]}" for rank, own in enumerate(ranks) if own[at]] for at in range(len(names))]
    name, why = next((name, "; ".join(each)) for name, each in zip(names, reasons, strict=True) if each)
    raise JoinError(
        f"the state of {name} cannot be copied from a rank that ran out of data last to the others: {why}; loop over"
        " join.iterate, which copies nothing [J440]"
    )


# -- from all to all ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def gather_trees(collective: Collective, tree: Any) -> list[Any]:
    """Return every rank's ``tree`` in rank order, on every rank; they may differ in shape. Tensors arrive on the CPU.

    Raises:
        RuntimeError: on every rank, if one has a leaf that is no tensor and cannot be pickled.
    """
    tensors: list[torch.Tensor] = []
    skeleton = _skeleton_of(pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, tree), tensors)
    skeletons = collective.all_gather_object(skeleton)
    received = collective.all_gather_uneven(_in_one(tensors).flat())
    trees: list[Any] = []
    for skeleton, data in zip(skeletons, received, strict=True):
        inbox = Inbox(skeleton)
        trees.append(inbox.fill(skeleton))
        _in_one([inbox.tensors[number] for number in sorted(inbox.tensors)]).unpack(data)
    return trees


def _in_one(tensors: Tensors) -> _Parcel:
    return _Parcel([tensors[number] for numbers in _plan(tensors) for number in numbers])

"""Copying of state from one rank to all, or from all ranks to all: tensors are sent as bytes, and the rest is pickled.

Active and joined ranks run the same code here, so there is one order of collectives. The tensors of one device form one
message, or several of 64 MiB each. All state that is copied at the end of an uneven block is sent together
(:func:`copy_state`)::

    rank that is copied                              every other rank
    -------------------                              ----------------
    skeletons of all trees, and the tensors of       the same: two broadcasts
    each message
    all-reduce: can all ranks copy the state?        all-reduce
    if one cannot: all-gather of reasons; all raise  the same
    tensors: one broadcast for each message          the same, into its own tensors if these fit

A single tree is sent in the same way, without the all-reduce. From all ranks to all (:func:`gather_trees`), there is
one all-gather of skeletons, each with the bytes of its tensors.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, cast

import torch

from join.collectives import Collective
from join.collectives._torch_private import pytree
from join.collectives.base import as_bytes
from join.errors import JoinError, described

Tensors: TypeAlias = Sequence[torch.Tensor]
_Plan: TypeAlias = Sequence[Sequence[int]]
"""For each message, the numbers of its tensors."""
CHUNK_BYTES = 64 * 2**20
"""Size of a message of copied state, unless a tensor is larger."""


# -- tensors -----------------------------------------------------------------------------------------------------------


def why_unlike(tensor: torch.Tensor) -> str:
    """Return the reason why a tensor cannot be sent, such as a shard of several ranks; "" if it can."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided:
        return ""
    return f"it holds a {tensor.layout} tensor of type {type(tensor).__name__}, which is not a plain tensor"


def broadcast_tensors(collective: Collective, tensors: Tensors, source: int) -> None:
    """Overwrite ``tensors`` in place with the tensors of rank ``source``. The extra memory is one chunk of 64 MiB.

    Args:
        collective: The ranks.
        tensors: Tensors of the same shapes and dtypes on all ranks.
        source: The rank whose tensors are sent.
    """
    _move(collective, _plan(tensors), tensors, source)


class _Parcel:
    """Tensors of one device that form one message. The largest elements come first, so that all tensors are aligned.

    Args:
        tensors: The tensors, in that order.
        kept: The ``id`` of each tensor that this rank does not overwrite.
    """

    def __init__(self, tensors: Tensors, kept: Iterable[int] = ()) -> None:
        self.tensors, self._kept = tensors, set(kept)
        self._sizes = [tensor.nbytes for tensor in tensors]

    @torch.no_grad()
    def move(self, collective: Collective, source: int) -> None:
        """Send the tensors, or receive them from rank ``source``."""
        first = self.tensors[0]
        is_source = collective.rank == source
        if len(self.tensors) == 1 and first.is_contiguous():
            collective.broadcast(as_bytes(first), source).wait()
            return
        flat = self._flat() if is_source else torch.empty(sum(self._sizes), dtype=torch.uint8, device=first.device)
        collective.broadcast(flat, source).wait()
        if not is_source:
            self._unpack(flat)

    def _flat(self) -> torch.Tensor:
        """Return the bytes of all tensors in one tensor."""
        return torch.cat([as_bytes(tensor.detach().contiguous()) for tensor in self.tensors])

    @torch.no_grad()
    def _unpack(self, flat: torch.Tensor) -> None:
        """Copy the bytes that :meth:`_flat` made into the tensors."""
        parts = cast("Sequence[torch.Tensor]", flat.split(self._sizes))
        for tensor, part in zip(self.tensors, parts, strict=True):
            if id(tensor) not in self._kept:
                tensor.copy_(part.view(tensor.dtype).view(tensor.shape))


def _plan(tensors: Tensors) -> _Plan:
    """Return the numbers of the tensors of each message: tensors of one device, up to the size of a chunk."""
    devices: dict[torch.device, list[int]] = {}
    itemsizes = [tensor.itemsize for tensor in tensors]
    for number, tensor in enumerate(tensors):
        if tensor.numel():
            devices.setdefault(tensor.device, []).append(number)
    chunks: list[list[int]] = []
    for numbers in devices.values():
        size = CHUNK_BYTES
        for number in sorted(numbers, key=itemsizes.__getitem__, reverse=True):
            nbytes = tensors[number].nbytes
            if size + nbytes > CHUNK_BYTES:
                chunks.append([])
                size = 0
            chunks[-1].append(number)
            size += nbytes
    return chunks


# -- trees -------------------------------------------------------------------------------------------------------------


def broadcast_tree(collective: Collective, tree: Any, source: int, devices: Iterable[torch.device] = ()) -> Any:
    """Return the ``tree`` of rank ``source`` on every rank: dicts, lists and tuples of tensors and picklable leaves.

    Args:
        collective: The ranks.
        tree: The tree to send. On the other ranks, their own tree, if they have one: its tensors receive the tensors of
            ``source`` that fit.
        source: The rank whose tree is sent.
        devices: The devices that this rank trains on. They are used for tensors that are not on a CPU at ``source`` and
            have no counterpart in ``tree`` here. Without them, such tensors go to the current device.

    Raises:
        RuntimeError: On every rank, if a leaf that is not a tensor cannot be pickled.
        TypeError: On every rank, if a container cannot be built without its tensors.
    """
    skeletons, plan, tensors = _broadcast_skeletons(collective, [tree], source)
    inbox = Inbox(tree if collective.rank == source else skeletons[0], devices)
    filled = inbox.fill(inbox.skeleton, tree)
    _move(collective, plan, tensors or inbox.tensors, source)
    return filled


def _broadcast_skeletons(collective: Collective, trees: list[Any], source: int) -> tuple[list[Any], _Plan, Tensors]:
    """Return the skeletons of the trees of rank ``source``, the messages, and, on ``source``, the tensors."""
    tensors: list[torch.Tensor] = []
    sent: Any = None
    if collective.rank == source:
        try:
            skeletons = [_skeleton_of(tree, tensors) for tree in trees]
            sent = skeletons, _plan(tensors)
        except Exception as error:  # some containers check their contents, such as PackedSequence
            sent = TypeError(
                f"A container cannot be sent to other ranks ({described(error)}). Put plain tensors into lists, tuples"
                " or dicts instead. [J100]"
            )
            sent.__cause__ = error
    received = collective.broadcast_object(sent, source)
    if isinstance(received, TypeError):
        raise received
    return *received, tensors


def _move(collective: Collective, plan: _Plan, tensors: Any, source: int, kept: Iterable[int] = ()) -> None:
    for numbers in plan:
        _Parcel([tensors[number] for number in numbers], kept).move(collective, source)


@dataclass(frozen=True)
class Slot:
    """Place of a tensor in a skeleton.

    Attributes:
        number: The number of the tensor among all tensors that are sent. A tensor at several places of a tree has one
            number.
        shape: The shape of the tensor.
        dtype: The dtype of the tensor.
        device: The type of the tensor's device, without an index, because each rank has its own device.
    """

    number: int
    shape: torch.Size
    dtype: torch.dtype
    device: str


class Inbox:
    """Tensors into which a rank receives the tensors of a skeleton.

    Args:
        skeleton: The skeleton of the sender's tree.
        devices: As for :func:`broadcast_tree`.
        keeps: Whether this rank has made as many steps as the sender, and so may keep its own state.

    Attributes:
        tensors: The receiving tensors, by the numbers of their slots.
        kept: The ``id`` of each tensor without memory whose message is received and dropped.
    """

    def __init__(self, skeleton: Any, devices: Iterable[torch.device] = (), *, keeps: bool = False) -> None:
        self.skeleton, self.keeps = skeleton, keeps
        self.tensors: dict[int, torch.Tensor] = {}
        self.kept: set[int] = set()
        self._used: set[int] = set()  # the id of each receiving tensor, since a tensor receives one slot only
        self._devices = {device.type: device for device in devices}

    def fill(self, skeleton: Any, own: Any = None, like: torch.Tensor | None = None, *, keeps: bool = False) -> Any:
        """Return ``skeleton`` with a tensor in each slot, to be overwritten by the message.

        Args:
            skeleton: The skeleton of the sender's tree, or of a part of it.
            own: The same part of this rank's tree. A tensor of it that fits its slot is used. If only the device type
                fits, the new tensor is on the same device.
            like: The parameter that the tensors belong to. The new tensors are on its device, unless they are on the
                CPU at the sender. If they have its shape, they also have its memory layout.
            keeps: Whether this rank keeps its own tree and only takes part in the broadcast.
        """
        own_at: dict[Any, Any] = dict(pytree.tree_flatten_with_path(own)[0])
        leaves, structure = cast("tuple[list[tuple[Any, Any]], Any]", pytree.tree_flatten_with_path(skeleton))
        filled: list[Any] = []
        for path, slot in leaves:
            if not isinstance(slot, Slot):
                filled.append(slot)
                continue
            if slot.number not in self.tensors:
                held: Any = own_at.get(path)
                is_on_device = isinstance(held, torch.Tensor) and held.device.type == slot.device
                device = self._devices.get(slot.device, torch.device(slot.device))
                if slot.device != "cpu" and like is not None:
                    device = like.device
                elif is_on_device:
                    device = held.device
                wanted = slot.shape, slot.dtype, device
                shell = torch.empty((), dtype=slot.dtype, device=device).expand(slot.shape)
                if keeps:
                    tensor = shell
                    self.kept.add(id(tensor))
                elif is_on_device and (held.shape, held.dtype, held.device) == wanted and id(held) not in self._used:
                    tensor = held
                else:
                    base = shell if like is None or like.shape != slot.shape else like
                    tensor = torch.empty_like(base, dtype=slot.dtype, device=device)
                self._used.add(id(tensor))
                self.tensors[slot.number] = tensor
            filled.append(self.tensors[slot.number])
        return pytree.tree_unflatten(filled, structure)


def _skeleton_of(tree: Any, tensors: list[torch.Tensor]) -> Any:
    """Return ``tree`` with a slot for each of its tensors, and append the tensors to ``tensors``."""
    numbers: dict[int, int] = {}

    def slot(tensor: torch.Tensor) -> Slot:
        number = numbers.setdefault(id(tensor), len(tensors))
        if number == len(tensors):
            tensors.append(tensor)
        return Slot(number, tensor.shape, tensor.dtype, tensor.device.type)

    return pytree.tree_map_only(torch.Tensor, slot, tree)


# -- state at the end of a block ---------------------------------------------------------------------------------------

Exchange: TypeAlias = Generator[Any, Inbox, None]
"""Part of one object in :func:`copy_state`.

The generator first yields a tree, which is sent if this rank is the one that is copied. It then receives an inbox with
the skeleton of the source's tree (on the source itself, with the tree), fills it, and yields the reason why this rank
cannot copy the state, or "". If all ranks can, the generator resumes once the tensors have arrived.
"""


def copy_state(
    collective: Collective,
    exchanges: Sequence[tuple[object, Exchange]],
    source: int,
    devices: Iterable[torch.device],
    *,
    keeps: bool = False,
) -> None:
    """Copy the state of several objects from rank ``source``. The docstring of the module has the order of collectives.

    Args:
        collective: The ranks.
        exchanges: For each object, what has its name as a text, and its part.
        source: The rank whose state is copied.
        devices: As for :func:`broadcast_tree`.
        keeps: As for :class:`Inbox`.

    Raises:
        JoinError: On every rank, if a rank cannot copy the state of an object.
        RuntimeError, TypeError: As for :func:`broadcast_tree`.
    """
    parts = [part for _, part in exchanges]
    trees = [next(part) for part in parts]
    skeletons, plan, tensors = _broadcast_skeletons(collective, trees, source)
    received = trees if collective.rank == source else skeletons
    inboxes = [Inbox(skeleton, devices, keeps=keeps) for skeleton in received]
    reasons: list[str] = [part.send(inbox) for part, inbox in zip(parts, inboxes, strict=True)]
    if collective.reduce_boolean_decision(any(reasons), all=False):
        _raise_not_copied([name for name, _ in exchanges], collective.all_gather_object(reasons, plain=True))
    slots = {number: tensor for inbox in inboxes for number, tensor in inbox.tensors.items()}
    kept = {number for inbox in inboxes for number in inbox.kept}
    _move(collective, plan, tensors or slots, source, kept)
    for part in parts:
        next(part, None)


def _raise_not_copied(names: Sequence[object], reasons_of_ranks: Sequence[Sequence[str]]) -> NoReturn:
    """Raise the error for the first object whose state some ranks cannot copy."""
    rows = zip(names, *reasons_of_ranks, strict=True)
    name, *reasons = next(row for row in rows if any(row[1:]))
    why = "; ".join(f"on rank {rank}, {reason}" for rank, reason in enumerate(reasons) if reason)
    raise JoinError(
        f"The state of {name} cannot be copied from the last rank with data to the others: {why}. Loop over"
        " join.iterate, which copies no state. [J440]"
    )


# -- from all to all ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def gather_trees(collective: Collective, tree: Any) -> list[Any]:
    """Return the ``tree`` of every rank in rank order, on every rank.

    The trees may differ in shape. Tensors arrive on the CPU.

    Raises:
        RuntimeError: On every rank, if a leaf that is not a tensor cannot be pickled.
    """
    tensors: list[torch.Tensor] = []
    skeleton = _skeleton_of(tree, tensors)
    # In one tensor of bytes, since pickle takes long for small tensors, and does not support every dtype.
    parts = [as_bytes(tensor.detach().cpu().contiguous()) for tensor in tensors]
    sent = skeleton, [len(part) for part in parts], torch.cat([torch.empty(0, dtype=torch.uint8, device="cpu"), *parts])
    return [_filled(*received) for received in collective.all_gather_object(sent)]


def _filled(skeleton: Any, sizes: list[int], data: torch.Tensor) -> Any:
    parts = cast("Sequence[torch.Tensor]", data.split(sizes))
    # Without the clone, a part may begin at an address that its dtype does not allow.
    return pytree.tree_map_only(
        Slot, lambda slot: parts[slot.number].clone().view(slot.dtype).view(slot.shape), skeleton
    )

"""Copying of state from one rank to all, or from all ranks to all: tensors are sent as bytes, and the rest is pickled.

:func:`pack` makes bytes of a tree, and puts its tensors aside. Active and joined ranks run the same code here, so there
is one order of collectives. The tensors of one device form one message, or several of 64 MiB each. All state that is
copied at the end of a block is sent together (:func:`copy_state`)::

    rank that is copied                              every other rank
    -------------------                              ----------------
    all trees, without tensors: a broadcast, and a   the same
        second one if they are large
    sum: how many ranks cannot copy the state?       sum
    if one cannot: all-gather of reasons; all raise  the same
    tensors: one broadcast for each message          the same, into its own tensors if these fit

A single tree is sent in the same way, without the sum. From all ranks to all (:func:`gather_trees`), there is one
all-gather of trees, each with the bytes of its tensors.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from copy import copy
from itertools import zip_longest
from typing import Any, NamedTuple, NoReturn, TypeAlias, cast

import torch
from typing_extensions import override

from join.collectives import Collective
from join.collectives._torch_private import pytree
from join.collectives.base import as_bytes
from join.collectives.line import SUMS
from join.errors import JoinError

Tensors: TypeAlias = Sequence[torch.Tensor]
Devices: TypeAlias = Callable[[], Iterable[torch.device]]
_Plan: TypeAlias = Sequence[Sequence[int]]
"""For each message, the numbers of its tensors."""
CHUNK_BYTES = 64 * 2**20
"""Size of a message of copied state, unless a tensor is larger."""


# -- tensors -----------------------------------------------------------------------------------------------------------


def why_unlike(*tensors: torch.Tensor) -> str:
    """Return the reason why one of these tensors cannot be sent, such as a shard of several ranks; "" if all can."""
    for tensor in tensors:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            return f"it holds a {tensor.layout} tensor of type {type(tensor).__name__}, which is not a plain tensor"
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return "it holds a tensor whose bytes are not those of its elements"
    return ""


def broadcast_tensors(collective: Collective, tensors: Tensors, source: int) -> None:
    """Overwrite ``tensors`` in place with the tensors of rank ``source``. The extra memory is one chunk of 64 MiB.

    Args:
        collective: The ranks.
        tensors: Tensors of the same shapes and dtypes on all ranks.
        source: The rank whose tensors are sent.
    """
    _move(collective, _plan(tensors), tensors, source)


def _plan(tensors: Tensors) -> _Plan:
    """Return the numbers of the tensors of each message: tensors of one device, up to the size of a chunk.

    The largest elements come first, so that all tensors are aligned.
    """
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


@torch.no_grad()
def _move(
    collective: Collective, plan: _Plan, tensors: Tensors, source: int, dropped: Container[int] = frozenset()
) -> None:
    """Send the tensors, or receive them from rank ``source`` and drop some of them, by the ``id`` of the receiver."""
    for numbers in plan:
        first, those = tensors[numbers[0]], [tensors[number] for number in numbers]
        if len(those) == 1 and first.is_contiguous():
            collective.broadcast(as_bytes(first), source).wait()
        elif collective.rank == source:
            flat = torch.cat([as_bytes(tensor.detach().contiguous()) for tensor in those])
            collective.broadcast(flat, source).wait()
        else:
            sizes = [tensor.nbytes for tensor in those]
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=first.device)
            collective.broadcast(flat, source).wait()
            for tensor, part in zip(those, cast("Tensors", flat.split(sizes)), strict=True):
                if id(tensor) not in dropped:
                    tensor.copy_(part.view(tensor.dtype).view(tensor.shape))


# -- trees as bytes ----------------------------------------------------------------------------------------------------


class Unfit(Exception):
    """A value cannot be sent or digested."""


class Packed(NamedTuple):
    """Tree as bytes, and the tensors in it."""

    data: bytes
    tensors: Tensors


class _Packer(pickle.Pickler):
    """Pickler that puts tensors aside, and refers to known ones by their numbers."""

    known: Mapping[int, int]
    unfit: Mapping[type, str] | None
    aside: Container[int] | None
    tensors: list[torch.Tensor]

    @override
    def reducer_override(self, obj: Any, /) -> Any:
        if id(obj) in self.known:
            return _known, (self.known[id(obj)],)
        if not isinstance(obj, torch.Tensor):
            for kind, why in (self.unfit or {}).items():
                if isinstance(obj, kind):
                    raise Unfit(why)
        elif (self.aside is None or id(obj) in self.aside) and (self.unfit or obj.layout is torch.strided):
            self.tensors.append(obj)
            return _tensor, (len(self.tensors) - 1,)
        return NotImplemented


def _known(number: int) -> Any:
    """Stand for a known tensor in a pickle."""


def _tensor(number: int) -> Any:
    """Stand for another tensor in a pickle."""


class _Unpacker(pickle.Unpickler):
    places: Mapping[str, Callable[[int], Any]]

    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        place = self.places.get(global_name) if module_name == __name__ else None
        return place or super().find_class(module_name, global_name)


def pack(
    tree: Any,
    known: Mapping[int, int] | None = None,
    unfit: Mapping[type, str] | None = None,
    *,
    is_digested: bool = False,
    aside: Container[int] | None = None,
) -> Packed:
    """Return a tree as bytes and tensors. It may raise what pickling an object raises.

    Args:
        tree: Any picklable objects with tensors.
        known: The numbers of tensors that :func:`unpack` replaces by the tensors of its own rank, by their ``id``.
        unfit: The classes of objects that cannot be sent, with the reason. With it, tensors have to be plain.
        is_digested: Whether the bytes are for a digest.
        aside: The ``id`` of tensors that are put aside; by default all. Others are pickled whole: an object may compute
            with its tensors when it is unpickled, before those that are put aside have arrived.

    Raises:
        Unfit: If an object cannot be sent.
    """
    file = io.BytesIO()
    packer = _Packer(file, 5)
    packer.known, packer.unfit, packer.aside, packer.tensors = known or {}, unfit, aside, []
    packer.fast = is_digested  # so that the bytes do not depend on which values are one object
    packer.dump(tree)
    if unfit is not None and (why := why_unlike(*packer.tensors)):
        raise Unfit(why)
    return Packed(file.getvalue(), packer.tensors)


def numbered(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the numbers of tensors by their ``id``."""
    return {id(tensor): number for number, tensor in enumerate(tensors)}


def unpack(packed: Packed, known: Tensors = ()) -> Any:
    """Return the tree that :func:`pack` made bytes of, with these tensors in it."""
    unpickler = _Unpacker(io.BytesIO(packed.data))
    unpickler.places = {"_tensor": packed.tensors.__getitem__, "_known": known.__getitem__}
    return unpickler.load()


class _Tree:
    """Tree that becomes bytes where a collective pickles it, so that all ranks raise the error if it cannot be.

    Args:
        tree: The tree.
        whole: Whether the bytes contain the tensors.
    """

    def __init__(self, tree: Any, *, whole: bool = False) -> None:
        self._tree, self._whole = tree, whole
        self.tensors: Tensors = ()

    @override
    def __reduce__(self) -> Any:
        data, self.tensors = pack(self._tree, aside=set(map(id, pytree.tree_leaves(self._tree))))
        kinds = [(tuple(tensor.shape), tensor.dtype, tensor.device.type) for tensor in self.tensors]
        if not self._whole:
            return tuple, ((data, kinds, _plan(self.tensors)),)
        # In one tensor of bytes, since pickle takes long for small tensors, and does not support every dtype.
        parts = [as_bytes(tensor.detach().cpu().contiguous()) for tensor in self.tensors]
        return _whole, (data, kinds, torch.cat([torch.empty(0, dtype=torch.uint8, device="cpu"), *parts]))


def _whole(data: bytes, kinds: Sequence[tuple[Any, ...]], flat: torch.Tensor) -> Any:
    """Return a tree with the tensors whose bytes are in ``flat``."""
    parts = cast("Tensors", flat.split([math.prod(shape) * dtype.itemsize for shape, dtype, _ in kinds]))
    # Without the clone, a part may begin at an address that its dtype does not allow.
    filled = [part.clone().view(kind[1]).view(kind[0]) for part, kind in zip(parts, kinds, strict=True)]
    return unpack(Packed(data, filled))


# -- from one to all ---------------------------------------------------------------------------------------------------


def broadcast_tree(collective: Collective, tree: Any, source: int, devices: Devices = list) -> Any:
    """Return the ``tree`` of rank ``source`` on every rank: any picklable objects with tensors.

    Args:
        collective: The ranks.
        tree: The tree to send. On the other ranks, their own tree, if they have one: its tensors receive the tensors of
            ``source`` that fit, if they are at the same place in dicts, lists and tuples.
        source: The rank whose tree is sent.
        devices: Returns the devices that this rank trains on. They are used for tensors that are not on a CPU at
            ``source`` and have no counterpart in ``tree`` here. Without them, such tensors go to the current device.

    Raises:
        RuntimeError: On every rank, if an object cannot be pickled.
    """
    inbox, move = _send(collective, tree, source, devices)
    received = inbox.fill(inbox.skeleton, tree)
    move()
    return received


class Inbox:
    """Tree of the rank that is copied, and the tensors into which this rank receives its tensors.

    Args:
        skeleton: The tree, or the part of the object that receives; on other ranks than the sender, each tensor in it
            has no memory.
        empty: These tensors.
        keeps: Whether this rank has made as many steps as the sender, and so may keep its own state.

    Attributes:
        receiving: The tensor that receives, by the ``id`` of the one without memory. What has none is dropped.
    """

    def __init__(self, skeleton: Any, empty: Tensors = (), *, keeps: bool = False) -> None:
        self.skeleton, self.keeps, self.empty = skeleton, keeps, empty
        self.receiving: dict[int, torch.Tensor] = {}
        self._used = set[int]()  # the id of each receiving tensor, since a tensor receives one slot only

    def fill(self, tree: Any, own: Any = None) -> Any:
        """Return the skeleton, or a part of it, with tensors that the message will overwrite.

        Args:
            tree: The skeleton, or a part of it.
            own: The same part of this rank's tree. If it has the same structure, its tensors that fit receive. If only
                the device type of one fits, the new tensor is on the same device.
        """
        if not self.empty:
            return tree
        (leaves, structure), (own_leaves, own_structure) = pytree.tree_flatten(tree), pytree.tree_flatten(own)
        # A copy by pickle, since pytree drops attributes of containers, such as the metadata of a module's state.
        data, empty = pack(tree, aside=set(map(id, self.empty)))
        pairs = zip(map(id, leaves), own_leaves, strict=True) if structure == own_structure else ()
        own_of = {place: leaf for place, leaf in pairs if isinstance(leaf, torch.Tensor) and not why_unlike(leaf)}
        return unpack(Packed(data, self.receive(empty, [own_of.get(id(each)) for each in empty])))

    def receive(
        self, empty: Tensors, own: Sequence[torch.Tensor | None] = (), like: torch.Tensor | None = None
    ) -> Tensors:
        """Return tensors that receive in the places of tensors without memory.

        Args:
            empty: These tensors.
            own: This rank's tensors in these places.
            like: The parameter that the tensors belong to. The new tensors are on its device, unless they are on the
                CPU at the sender. If they have its shape, they also have its memory layout.
        """
        received: list[torch.Tensor] = []
        for each, mine in zip_longest(empty, own[: len(empty)]):
            if id(each) not in self.receiving:
                device = each.device
                if like is not None and device.type != "cpu":
                    device = like.device
                elif mine is not None and mine.device.type == device.type:
                    device = mine.device
                fits = mine is not None and (mine.shape, mine.dtype, mine.device) == (each.shape, each.dtype, device)
                if mine is None or not fits or id(mine) in self._used:
                    base = each if like is None or like.shape != each.shape else like
                    mine = torch.empty_like(base, dtype=each.dtype, device=device, requires_grad=False)
                self._used.add(id(mine))
                self.receiving[id(each)] = mine
            received.append(self.receiving[id(each)])
        return received


def _send(
    collective: Collective, tree: Any, source: int, devices: Devices, *, keeps: bool = False
) -> tuple[Inbox, Callable[[], None]]:
    """Send the tree of rank ``source``; return its inbox, and a function that sends the tensors."""
    sent = _Tree(tree)
    received: Any = collective.broadcast_object(sent, source)
    if received is sent:
        return Inbox(tree, keeps=keeps), lambda: broadcast_tensors(collective, sent.tensors, source)
    data, kinds, plan = received
    own_devices = devices() if {kind for *_, kind in kinds} - {"cpu"} else ()
    device_of = {device.type: device for device in own_devices}
    empty = [
        torch.empty((), dtype=dtype, device=device_of.get(kind, torch.device(kind))).expand(shape)
        for shape, dtype, kind in kinds
    ]
    inbox = Inbox(unpack(Packed(data, empty)), empty, keeps=keeps)

    def move() -> None:
        dropped = {id(each) for each in empty if id(each) not in inbox.receiving}
        _move(collective, plan, [inbox.receiving.get(id(each), each) for each in empty], source, dropped)

    return inbox, move


# -- state at the end of a block ---------------------------------------------------------------------------------------

Exchange: TypeAlias = Generator[Any, Inbox, None]
"""Part of one object in :func:`copy_state`.

The generator first yields a tree, which is sent if this rank is the one that is copied. It then receives an inbox with
the skeleton of the source's tree (on the source itself, with the tree), fills it, and yields the reason why this rank
cannot copy the state, or "". If all ranks can, the generator resumes once the tensors have arrived.
"""


def copy_state(
    collective: Collective,
    exchanges: Sequence[tuple[str, Exchange]],
    source: int,
    devices: Devices = list,
    *,
    keeps: bool = False,
) -> None:
    """Copy the state of several objects from rank ``source``. The docstring of the module has the order of collectives.

    Args:
        collective: The ranks.
        exchanges: The name of each object, and its part.
        source: The rank whose state is copied.
        devices: As for :func:`broadcast_tree`.
        keeps: As for :class:`Inbox`.

    Raises:
        JoinError: On every rank, if a rank cannot copy the state of an object.
        RuntimeError: As for :func:`broadcast_tree`.
    """
    names, parts = zip(*exchanges, strict=True)
    inbox, move = _send(collective, list(map(next, parts)), source, devices, keeps=keeps)
    trees, reasons = inbox.skeleton, list[str]()
    for part, inbox.skeleton in zip(parts, trees, strict=True):
        reasons.append(part.send(inbox))
    refusing = collective.line(SUMS).sum(int(any(reasons)), collective.world_size.bit_length())
    collective.finish(refusing)
    if refusing.total():
        _raise_not_copied(names, collective.all_gather_object(reasons, plain=True))
    move()
    for part in parts:
        next(part, None)


def _raise_not_copied(names: Sequence[str], reasons_of_ranks: Sequence[Sequence[str]]) -> NoReturn:
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
        RuntimeError: On every rank, if an object cannot be pickled.
    """
    sent = _Tree(tree, whole=True)
    return [copy(sent) if row is sent else row for row in collective.all_gather_object(sent)]

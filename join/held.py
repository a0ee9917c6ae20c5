"""State that was equal when a block was entered, and is equal when it is left: :class:`Held`.

Each joinable lists the objects that it stands for, with their values by name (``Joinable.held``): attributes of an
optimizer, counters of a module, a sample of an EMA copy. On entering, a rank keeps plain values, and digests of others.
Nothing is sent then. The ranks compare when they leave::

    uneven plain block                               any other block
    ------------------                               ---------------
    row, with a digest of all that has changed       the same
    if digests differ, in the one copy of all        if digests differ: all-gather of digests on entering
    state: the values of the last rank with data,    and now; what was equal on entering, and differs now,
    with their digests on entering; another rank     is an error (EMA copies) or one warning (attributes)
    takes those that it has entered with, too

A value that is too large, or that cannot be pickled, stays as it is, and the log names it once.
"""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any, NamedTuple, TypeAlias, cast
from zlib import crc32

import torch

from join.agreement import digest, is_same, raise_difference
from join.collectives import Collective
from join.collectives._torch_private import may_receive
from join.collectives.base import as_bytes
from join.errors import described
from join.transfer import Exchange, Packed, Unfit, numbered, pack, unpack

PLAIN = frozenset({bool, int, float, complex, str, type(None)})
"""Types of values that are sent and compared as they are."""
CONTAINERS = (list, tuple, set, frozenset, deque)
LARGEST = 2**20  # bytes of a value, besides tensors
_LARGEST_TENSOR = 2**14  # bytes of a tensor that is compared; of a larger one, its last row is
UNFIT: Mapping[type, str] = {MethodType: "it holds a method"}
"""Classes of objects that cannot be sent in state, with the reason."""
_UNFIT_IN_ATTRIBUTES = {
    **UNFIT,
    torch.nn.Module: "it holds a module, of which another rank would get a copy beside its own",
}
_LEFT_OUT = "left out"
_AT_END = 6  # stack level of the user's with statement
_logger = logging.getLogger("join")


class Part(NamedTuple):
    """Values of one object.

    Attributes:
        name: The name of the object, for texts.
        values: The values by name. Tensors in them that the object writes in place are copied in place.
        load: A function that takes new values by name; ``None`` if the values are only compared.
        known: A function that returns tensors which are not part of the values, such as parameters. A value refers to
            them by their numbers.
        is_required: Whether a difference after an even block is an error.
    """

    name: str
    values: Mapping[str, Any]
    load: Callable[[Mapping[str, Any]], object] | None
    known: Callable[[], Sequence[torch.Tensor]] = list
    is_required: bool = False


class Holder(NamedTuple):
    """Value that contains objects with values of their own, which are parts themselves."""

    value: Any


# -- values ------------------------------------------------------------------------------------------------------------


def pack_attribute(value: Any, known: Sequence[torch.Tensor] = (), *, is_digested: bool = False) -> Packed:
    """Return the value of an attribute as bytes and tensors, as :func:`join.transfer.pack` does.

    Raises:
        Unfit: If the value is too large, or cannot be pickled.
    """
    if is_larger(value, LARGEST):
        why = f"it takes more than {LARGEST >> 20} MiB"
        raise Unfit(why)
    try:
        value = _ordered(value) if is_digested else value
        return pack(value, numbered(known), _UNFIT_IN_ATTRIBUTES, is_digested=is_digested)
    except Exception as error:  # of code of the user's
        raise Unfit(str(error) if isinstance(error, Unfit) else described(error)) from error


def is_larger(value: Any, limit: int) -> bool:
    """Return whether a value takes more bytes, by the lengths of its containers. Tensors do not count."""
    values, total = [value], 0
    while values and total <= limit:
        each = values.pop()
        if isinstance(each, (str, bytes, bytearray)):
            total += len(each)
        elif isinstance(each, (dict, *CONTAINERS)):
            total += 16 * len(cast("Sequence[Any]", each))
            if total <= limit:
                inside = cast("Iterable[Any]", each.values() if isinstance(each, dict) else each)
                values += [one for one in inside if type(one) not in PLAIN or type(one) is str]
        elif not isinstance(each, torch.Tensor):
            total += each.nbytes if hasattr(cast("Any", type(each)), "nbytes") else 16  # of an array of numpy
    return total > limit


def _ordered(value: Any) -> Any:
    """Return a value with a list for each set in it, which each rank may hold in another order."""
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, cast("Iterable[Any]", value)))
    if type(value) is dict:
        held = cast("dict[Any, Any]", value)
        return dict(zip(held, map(_ordered, held.values()), strict=True))
    return [*map(_ordered, cast("Iterable[Any]", value))] if type(value) in (list, tuple) else value


def _of_tensor(tensor: torch.Tensor) -> Any:
    """Return its shape and dtype, and a checksum of it, or of its last row: reading a tensor must not take long."""
    shape = tuple(tensor.shape), tensor.dtype
    while tensor.nbytes > _LARGEST_TENSOR:
        tensor = tensor[-1]
    if not (tensor.is_cpu and tensor.nbytes):
        return shape
    data = bytearray(tensor.nbytes)
    torch.frombuffer(data, dtype=torch.uint8).copy_(as_bytes(tensor.detach().contiguous()))
    return shape, crc32(data)


# -- a block -----------------------------------------------------------------------------------------------------------

_Key: TypeAlias = tuple[str, str]
"""The name of a part, and the name of a value in it."""


class Held:
    """Values that the objects of a block had on entering it.

    Args:
        parts: A function that returns the present values of all objects.
        own: The names of attributes that each rank has for itself, as ``own_attributes`` of ``Join``.
        collective: The ranks.
    """

    def __init__(self, parts: Callable[[], Iterable[Part]], own: Sequence[str], collective: Collective) -> None:
        self._parts, self._own, self._collective = parts, frozenset(own), collective
        self._has_unread_tensors = False
        self._before = self._after = self._fingerprints()

    def _items(self) -> list[tuple[_Key, Part, Any]]:
        """Return all values that are not each rank's own, with their parts."""
        own, parts = self._own, self._parts()
        items = [((part.name, name), part, value) for part in parts for name, value in part.values.items()]
        return [item for item in items if own.isdisjoint((item[0][1], ".".join(item[0])))] if own else items

    def _fingerprints(self) -> dict[_Key, Any]:
        found: dict[_Key, Any] = {}
        for key, part, value in self._items():
            try:
                found[key] = value if type(value) in PLAIN else self._fingerprint(value, part)
            except Unfit as why:
                self._leave_out(key, why)
                found[key] = _LEFT_OUT, self._collective.rank  # which no other rank has
        return found

    def _fingerprint(self, value: Any, part: Part) -> Any:
        """Return the number by which a value that is not plain is known."""
        if isinstance(value, Holder):
            return type(value.value).__name__
        data, tensors = pack_attribute(value, part.known(), is_digested=True)
        self._has_unread_tensors |= any(each.nbytes > _LARGEST_TENSOR or not each.is_cpu for each in tensors)
        return crc32(repr([*map(_of_tensor, tensors)]).encode(), crc32(data))

    def _leave_out(self, key: _Key, why: Unfit) -> None:
        name, logged = ".".join(key), self._collective.kept.logged
        if name not in logged:
            logged.add(name)
            _logger.warning("Join leaves out %s, which may differ between ranks after a block: %s.", name, why)

    # -- after an even block ------------------------------------------------------------------------------------------

    def digest_of_changes(self, *, is_copied: bool = False) -> int:
        """Return a digest of the values that have changed since entering; 0 if no value has.

        Ranks with the same digest hold the same values, of those that were equal on entering.

        Args:
            is_copied: Whether a value that differs now will be copied. Then ranks with tensors that no digest contains
                have different digests.
        """
        before, self._after, logged = self._before, self._fingerprints(), self._collective.kept.logged
        if is_copied and self._has_unread_tensors:
            return self._collective.rank + 1
        if before == self._after:
            return 0
        changed: list[tuple[_Key, str]] = []
        for key, value in self._after.items():
            counts = is_copied or ".".join(key) not in logged
            if counts and repr(before.get(key, ...)) != repr(value):
                changed.append((key, repr(value)))
        return digest(repr(changed)) if changed else 0

    def compare(self) -> Callable[[], None]:
        """Compare the values of ranks that have all made the same steps; called on all ranks if the digests differ.

        Returns:
            A function that warns of attributes that were equal on entering, and are not any more.

        Raises:
            ProtocolError: If values that have to be equal were, and are not any more. All ranks raise it.
        """
        rows: list[tuple[dict[_Key, Any], dict[_Key, Any]]]
        rows = self._collective.all_gather_object((self._before, self._after))
        keys = dict.fromkeys(key for row in rows for held in row for key in held)
        apart = [
            key
            for key in keys
            if _are_same(key[1], [before.get(key, ...) for before, _ in rows])
            and not _are_same(key[1], [after.get(key, ...) for _, after in rows])
        ]
        required = {key for key, part, _ in self._items() if part.is_required}
        raise_difference(
            {
                rank: [(of, {name: after.get((of, name))}) for of, name in apart if (of, name) in required]
                for rank, (_, after) in enumerate(rows)
            }
        )
        logged = self._collective.kept.logged
        new = [key for key in apart if ".".join(key) not in logged]
        logged |= set(map(".".join, new))
        texts = [f"{'.'.join(key)} is now {_listed([after.get(key) for _, after in rows])}" for key in new]
        return partial(_warn, [name for _, name in new], texts)

    # -- after an uneven block ----------------------------------------------------------------------------------------

    def exchange(self, source: int) -> Exchange:
        """Take from rank ``source`` the values that this rank has entered the block with, too."""
        own: dict[_Key, Any] = {}
        for key, part, value in self._items():
            if part.load is None or (
                isinstance(value, Holder) and self._before.get(key) == self._fingerprint(value, part)
            ):
                continue
            try:
                value = value.value if isinstance(value, Holder) else value
                own[key] = value if type(value) in PLAIN else pack_attribute(value, part.known())
            except Unfit as why:
                self._leave_out(key, why)
        inbox = yield {key: (self._before.get(key, ...), value) for key, value in own.items()}
        received = cast("dict[_Key, tuple[Any, Any]]", inbox.skeleton)
        taken = {key for key, (before, _) in received.items() if is_same(key[1], before, self._before.get(key, ...))}
        if self._collective.rank == source or inbox.keeps:
            yield ""
            return
        filled = {key: received[key][1] for key in taken}
        for key, value in filled.items():
            if isinstance(value, Packed):  # a value that differed is not received in this rank's tensors
                mine = own[key].tensors if isinstance(own.get(key), Packed) else ()
                mine = [tensor if may_receive(tensor) else None for tensor in mine]
                filled[key] = Packed(value.data, inbox.receive(value.tensors, mine))
        yield ""
        for part in self._parts():  # again, since an object may have been replaced meanwhile
            values: dict[str, Any] = {}
            for key in [key for key in filled if key[0] == part.name]:
                value = filled[key]
                try:
                    values[key[1]] = unpack(value, part.known()) if isinstance(value, Packed) else value
                except Exception as error:  # of code of the user's
                    self._leave_out(key, Unfit(described(error)))
            if values and part.load is not None:
                part.load(values)


def _are_same(name: str, values: Sequence[Any]) -> bool:
    return all(is_same(name, values[0], value) for value in values)


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(values))


def _warn(names: Sequence[str], texts: Sequence[str]) -> None:
    if texts:
        warnings.warn(
            f"{'; '.join(texts)}. All ranks entered the Join block with the same value. Change it alike on all ranks,"
            " even if join.shadowing is true. If each rank has a value of its own, write Join(...,"
            f" own_attributes={sorted(set(names))}).",
            stacklevel=_AT_END,
        )

"""Ranks of a process group and their operations, whichever library connects them: :class:`Collective`.

A backend for another library derives from :class:`Collective` and writes six methods. Nothing else is needed::

    setup(rank, world_size)               connects the ranks, and calls super().setup(rank, world_size)
    teardown()                            closes the connections, and calls super().teardown()
    all_reduce, broadcast, all_gather     start an operation on tensors of any device, and return a ``Work``
    barrier()                             waits for all ranks

The rest is made of these six. Methods under "for backends" may be overridden, where a library has a faster way, or can
do more when a rank fails. Methods that are ``@final`` stay as they are.

Operations are matched by their order: the n-th operation of one rank meets the n-th operation of every other rank.
"""

from __future__ import annotations

import json
import pickle
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, Generic, Literal, TypeAlias, TypeVar, cast, get_args

import torch
import torch.distributed as dist
from typing_extensions import final, override

from join.collectives.board import Board, LocalBoard, StoreBoard
from join.collectives.line import MESSAGES, SUMS, Line, Sum, Work
from join.collectives.shared_memory import Lane, Segment, SharedBoard, SharedMemoryLine, opened
from join.collectives.store import shared_store

ReduceOp: TypeAlias = Literal["sum", "min", "max"]

V = TypeVar("V")

_WORD_BITS = 63  # of an int64 without its sign
_SIZE = struct.Struct("<q")  # of an object, in bytes
_ROOM = 4096 - _SIZE.size  # bytes of a broadcast object in its first message; only a larger one needs a second message


@dataclass
class Kept:
    """Facts about a process group that last longer than its ``Join`` blocks.

    Attributes:
        timeout: The seconds that a rank waits for another one in shared memory.
        agreed: Digests of the arguments of earlier blocks (``join.block``), on which the ranks agreed.
        watch: The watch of the group (``join.failure.watch``).
        lost: The failure of a block, after which ranks may wait in different collectives; "" without one.
        is_connected: Whether the ranks know what carries their messages.
        segment: Memory that all ranks share; ``None`` if not all ranks can reach it.
        lanes: Lanes of the shared memory that are in use, by the number of their line.
        companion: The second collective of the group, if it has been made.
        store: The store that the ranks have made for their notes, if they needed one.
        generators: The kinds of random generators that were equal on all ranks when the last block was left.
        logged: What has been said once about state in the blocks of this group.
    """

    timeout: float = 1800.0
    agreed: set[int] = field(default_factory=set[int])
    watch: Any = None
    lost: str = ""
    is_connected: bool = False
    segment: Segment | None = None
    lanes: dict[int, Lane] = field(default_factory=dict[int, Lane])
    companion: Any = None
    store: dist.Store | None = None
    generators: set[str] = field(default_factory=set[str])
    logged: set[str] = field(default_factory=set[str])


class Collective(ABC):
    """Ranks of one process group and their common operations. Tensors may be on any device that the group supports.

    The constructor only stores its arguments, for :meth:`setup`. An operation returns a :class:`Work` once it has
    started. A backend whose operations block returns ``DONE``. A rank in such an operation sees the failure of another
    rank only when the operation fails.
    """

    rank: int
    """This rank, counted from 0; from ``setup`` on."""
    world_size: int
    """The number of ranks; from ``setup`` on."""
    waiter: Callable[[Work], object] | None = None
    """While a block is open, waits for an operation and looks at the other ranks meanwhile."""

    def setup(self, rank: int, world_size: int) -> None:
        """Connect the ranks; called on all ranks, before any operation.

        Args:
            rank: This rank, counted from 0.
            world_size: The number of ranks.

        Raises:
            ValueError: If there is no such rank, or if the ranks are connected already, with different numbers.
        """
        known = self._connected_as()
        if not 0 <= rank < world_size or (known or (rank, world_size)) != (rank, world_size):
            state = "is not set up" if known is None else f"is rank {known[0]} of {known[1]}"
            raise ValueError(
                f"setup(rank={rank}, world_size={world_size}) is not possible for this {type(self).__name__}, which"
                f" {state}. Pass a rank from 0 on and the number of ranks, as a launcher has numbered them, and call"
                " teardown() before you change them. [J817]"
            )
        self.rank, self.world_size = rank, world_size

    def teardown(self) -> None:
        """Close the connections. A second call does nothing.

        The other ranks may be gone, so this waits for none of them. Afterwards, ``setup`` may be called again.
        """
        for name in ("rank", "world_size", "kept"):
            vars(self).pop(name, None)

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """Start reducing ``tensor`` over all ranks, in place.

        Raises:
            ValueError: If ``op`` is unknown, before anything is sent.
        """

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        """Start copying ``tensor`` of rank ``source`` into the tensor of every other rank, in place.

        Raises:
            ValueError: If ``source`` is not a rank, before anything is sent.
        """

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor]) -> Work:
        """Start copying ``tensor`` of every rank into ``outputs``, in rank order.

        Args:
            tensor: A tensor of the same shape and dtype on all ranks.
            outputs: One contiguous tensor for each rank, with the shape, dtype and device of ``tensor``.

        Raises:
            ValueError: If ``outputs`` do not match, before anything is sent.
        """

    def barrier(self) -> None:
        """Wait until all ranks have called this. By default, the ranks reduce one number."""
        self.reduce_boolean_decision(True)

    # -- made of these operations -------------------------------------------------------------------------------------

    @final
    def finish(self, work: Work, *, on_cpu: bool = True) -> None:
        """Wait for an operation. On the CPU, inside a block, raise an error if another rank fails meanwhile."""
        if self.waiter is None or not on_cpu:
            work.wait()
        else:
            self.waiter(work)

    @final
    def broadcast_object(self, value: Any, source: int, *, plain: bool = False) -> Any:
        """Return ``value`` of rank ``source`` on every rank. It is pickled.

        Args:
            value: The value to send; on the other ranks, it is not used.
            source: The rank whose value is sent.
            plain: Whether the value is sent as JSON instead, which cannot run code where it is read. It then consists
                of numbers, texts, lists and dicts. Tuples arrive as lists, and other objects as their ``repr``.

        Raises:
            RuntimeError: On every rank, if ``source`` cannot pickle it. With ``plain``, if it does not arrive as JSON.
            ValueError: If ``source`` is not a rank.
        """
        data = _packed(value, plain) if self.rank == source else bytearray()
        first = bytearray(_SIZE.pack(len(data)) + data[:_ROOM].ljust(_ROOM))
        self.finish(self.broadcast(torch.frombuffer(first, dtype=torch.uint8), source))  # checks the source
        (size,) = _SIZE.unpack_from(first)
        if rest := data[_ROOM:] or bytearray(max(size - _ROOM, 0)):
            self.finish(self.broadcast(torch.frombuffer(rest, dtype=torch.uint8), source))
        data = (first[_SIZE.size :] + rest)[:size]
        return self._unpacked({source: data}, value, plain)[0]

    @final
    def all_gather_object(self, value: Any, *, plain: bool = False) -> list[Any]:
        """Return ``value`` of every rank, in rank order. It is pickled.

        Args:
            value: The value of this rank.
            plain: As for :meth:`broadcast_object`.

        Raises:
            RuntimeError: On every rank, if one of them cannot pickle its value. With ``plain``, if a value does not
                arrive as JSON.
        """
        data = _packed(value, plain)
        counts = torch.empty(self.world_size, dtype=torch.int64, device="cpu")
        self.finish(self.all_gather(torch.tensor(len(data), device="cpu"), counts.unbind()))
        sizes = cast("list[int]", counts.tolist())
        data.extend(bytes(max(sizes) - len(data)))
        received = [bytearray(max(sizes)) for _ in sizes]
        outputs = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in received]
        self.finish(self.all_gather(torch.frombuffer(data, dtype=torch.uint8), outputs))
        return self._unpacked({rank: received[rank][:size] for rank, size in enumerate(sizes)}, value, plain)

    def _unpacked(self, received: Mapping[int, bytearray], value: Any, plain: bool) -> list[Any]:
        """Return the values that ranks have sent, and ``value`` for this rank."""
        failed = [f"rank {rank}: {data[1:].decode()}" for rank, data in received.items() if not data[0]]
        if failed:
            raise RuntimeError(
                f"Some ranks cannot pickle the object to send ({', '.join(failed)}). Send objects that pickle"
                " supports. [J026]"
            )
        if plain:
            return [_plain_from(data[1:], rank) for rank, data in received.items()]
        return [value if rank == self.rank else pickle.loads(data[1:]) for rank, data in received.items()]

    @final
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks passed ``True``, or with ``all=False`` whether any did; equal on every rank."""
        vote = torch.tensor([int(decision)], device="cpu")
        self.finish(self.all_reduce(vote, "min" if all else "max"))
        return bool(vote.item())

    # -- for backends -------------------------------------------------------------------------------------------------

    @cached_property
    def kept(self) -> Kept:
        """Facts about the group that last longer than its blocks."""
        return Kept()

    def companion(self) -> Collective:
        """Return a second collective of the same ranks, whose operations do not mix with the operations of this one.

        Every call returns the same object. The first call happens on all ranks, in the same order among their
        operations. A backend without a second collective returns this one.
        """
        return self

    def line(self, number: int = MESSAGES) -> Line:
        """Return the line of this number. Objects of several calls continue one sequence of operations.

        Ranks on one machine share memory. For others, each sum is an all-reduce of the companion. The first call
        happens on all ranks, in the same order among their operations.

        Args:
            number: ``MESSAGES`` for a line whose operations do not mix with the operations of this collective, if the
                backend has a companion. ``SUMS`` for sums between these operations, in one order with them on all
                ranks, after all ranks have asked for the other line.
        """
        kept = self.kept
        if not kept.is_connected:
            share = partial(self.broadcast_object, source=0, plain=True)
            kept.segment = opened(self.rank, self.world_size, share)  # before the vote, for a note of a rank that fails
            if not self.reduce_boolean_decision(kept.segment is not None):
                kept.segment = None
                self.connect()
            kept.is_connected = True

        def over_group() -> Line:
            return GroupLine(self if number == SUMS else self.companion())

        if kept.segment is None:
            return over_group()
        if number not in kept.lanes:
            kept.lanes[number] = Lane(kept.segment, number, kept.timeout)
        return SharedMemoryLine(kept.lanes[number], over_group)

    def connect(self) -> None:
        """Prepare messages between ranks that share no memory; called once, on all ranks in the same place.

        By default, rank 0 makes a store for notes, if all ranks are on one machine. For ranks on several machines, a
        backend overrides :meth:`board` with a store that they have.
        """
        self.kept.store = shared_store(self.rank, partial(self.all_gather_object, plain=True))

    def board(self) -> Board:
        """Return the board for notes between ranks, in the memory or the store that :meth:`line` has found.

        Before, and without one, no rank reads the notes of another one.
        """
        kept = self.kept
        if kept.segment is not None:
            return SharedBoard(kept.segment)
        if kept.store is not None:
            return StoreBoard(self.rank, self.world_size, kept.store)
        return LocalBoard(self.rank, self.world_size)

    def issued_counter(self) -> Callable[[], int]:
        """Return a function that returns the number of operations started on the group on this rank.

        The function returns 0 if the backend does not count.
        """
        return int

    def limit(self, timeout: timedelta) -> timedelta | None:
        """Make operations of the group fail if they take longer than ``timeout``, if the backend supports it.

        Returns:
            The previous limit; ``None`` if nothing was changed.
        """
        return None

    def abort(self, *, connections: bool = False) -> bool:
        """Abort the operations of this process on its accelerators, which may otherwise never end.

        Any thread may call this once a rank has failed. The process groups of this process are unusable afterwards.

        Args:
            connections: Whether to close the connections of this group, too, so that other ranks stop waiting for this
                one. Pass ``True`` if the ranks did not all fail at the same place.

        Returns:
            Whether this process has groups on accelerators.
        """
        return False

    def hold(self) -> None:
        """Never run the group's destructor, which would wait for an operation that no other rank joins."""

    def _connected_as(self) -> tuple[int, int] | None:
        """Return this rank and the number of ranks, if they are known before ``setup``, or from an earlier one."""
        return (self.rank, self.world_size) if hasattr(self, "rank") else None

    @final
    def _check_source(self, source: int) -> None:
        if not 0 <= source < self.world_size:
            raise ValueError(f"source={source} is not a rank. Pass a rank from 0 to {self.world_size - 1}. [J031]")

    @final
    def _check_outputs(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
        kinds = {(output.dtype, output.shape, output.device, output.is_contiguous()) for output in outputs}
        if len(outputs) != self.world_size or kinds != {(tensor.dtype, tensor.shape, tensor.device, True)}:
            found = ", ".join(f"{describe(dtype, shape)} on {device}" for dtype, shape, device, _ in kinds)
            raise ValueError(
                f"outputs has {len(outputs)} tensors for {self.world_size} ranks ({found}), and the tensor is"
                f" {describe(tensor.dtype, tensor.shape)} on {tensor.device}. Pass a contiguous output like the tensor"
                " for each rank. [J033]"
            )


class GroupLine(Line):
    """Line over a collective. Each sum is an all-reduce, in one order with all other operations of the collective."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective

    @override
    def sum(self, number: int, bits: int) -> Sum[int]:
        # If there are several words, all but the last need spare bits for the carry of the sum.
        size = _WORD_BITS if bits <= _WORD_BITS else _WORD_BITS - self._collective.world_size.bit_length()
        mask = (1 << size) - 1
        words = torch.tensor([number >> shift & mask for shift in range(0, bits, size)], device="cpu")

        def joined(words: torch.Tensor) -> int:
            return sum(word << place * size for place, word in enumerate(cast("list[int]", words.tolist())))

        return _GroupSum(self._collective.all_reduce(words), words, joined)

    @override
    def sum_float(self, number: float) -> Sum[float]:
        total = torch.tensor(number, dtype=torch.float64, device="cpu")
        return _GroupSum(self._collective.all_reduce(total), total, torch.Tensor.item)

    @override
    def gather(self, data: bytes) -> Sum[list[bytes]]:
        rows = torch.empty(self._collective.world_size, len(data), dtype=torch.uint8, device="cpu")
        work = self._collective.all_gather(torch.frombuffer(bytearray(data), dtype=torch.uint8), rows.unbind())
        return _GroupSum(work, rows, lambda rows: [*map(bytes, cast("list[list[int]]", rows.tolist()))])


class _GroupSum(Sum[V], Generic[V]):
    """Operation on a tensor, from which ``read`` makes the sum."""

    def __init__(self, work: Work, tensor: torch.Tensor, read: Callable[[torch.Tensor], V]) -> None:
        self.wait, self.is_completed, self.nbytes = work.wait, work.is_completed, tensor.nbytes
        self._tensor, self._read = tensor, read

    def total(self) -> V:
        self.wait()
        return self._read(self._tensor)


def check_op(op: str) -> None:
    """Raise a ``ValueError`` for an unknown ``op``."""
    known = get_args(ReduceOp)
    if op not in known:
        raise ValueError(f"op={op!r} is unknown. Pass one of {', '.join(map(repr, known))}. [J035]")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of a contiguous tensor's bytes.

    In this form a backend can copy dtypes that it does not support.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # a single element has any stride


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor with the same numbers, in a dtype that every library can reduce."""
    least = torch.float32 if tensor.is_floating_point() else torch.int32
    return tensor.detach().to(torch.promote_types(tensor.dtype, least)).contiguous()


@torch.no_grad()
def put_back(tensor: torch.Tensor, result: torch.Tensor) -> None:
    """Write the result of an operation on a :func:`widened` tensor into the tensor."""
    tensor.copy_(result)


def describe(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Return the dtype and shape of a tensor in short, such as ``float32[2, 3]``."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _packed(value: Any, plain: bool) -> bytearray:
    """Return 1 and the value as bytes, or 0 and the reason why it cannot be pickled."""
    try:
        return bytearray(b"\1" + (json.dumps(value, default=repr).encode() if plain else pickle.dumps(value)))
    except Exception as unpicklable:
        return bytearray(b"\0" + f"{type(unpicklable).__name__}: {unpicklable}".encode())


def _plain_from(data: bytearray, rank: int) -> Any:
    """Return the value that a rank sent as JSON."""
    try:
        return json.loads(data)
    except Exception as error:
        raise RuntimeError(
            f"Rank {rank} sent {bytes(data[:40])!r}, which is not JSON ({error}). It may run another version of"
            " joinables, or be a process of another job. Install the same version on all ranks, and start each job with"
            " a MASTER_PORT of its own. [J571]"
        ) from None

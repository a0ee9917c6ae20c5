"""The seam between the protocol and whatever carries it: :class:`Collective`, and its :class:`Line` for small numbers.

A collective connects the ranks of one group. Operations are matched by their order: the n-th operation of one rank
meets the n-th of every other. What returns a :class:`Work` has only been started, what returns a value is done. Next to
them is a small key-value store, for texts that need no operation of all.

A backend implements the abstract methods, and may override what is not final. One that calls :meth:`_take_place` when
it is set up has its rank and world size from here.
"""

from __future__ import annotations

import math
import pickle
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from fractions import Fraction
from functools import reduce
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeAlias, TypeVar, cast, get_args

import torch
from typing_extensions import final, override

from join.collectives.board import Board

ReduceOp: TypeAlias = Literal["sum", "min", "max"]
ResultOp: TypeAlias = Literal["mean", "sum", "min", "max"]

V = TypeVar("V")
V_co = TypeVar("V_co", covariant=True)

Exact: TypeAlias = int | Fraction | float
"""A number that is added up without rounding; a float is infinite or NaN."""

HEADERS, ROLL_CALLS, BARRIERS, SUMS = range(4)
"""The lines of a group: of headers, of the roll calls of loops in lockstep, of barriers in them, and of sums."""
_WORD_BITS = 63  # the sign stays free


class Work(Protocol):
    """A collective under way; ``torch.distributed.Work`` is one."""

    def wait(self, timeout: timedelta = ..., /) -> bool:
        """Block until done.

        Raises:
            RuntimeError: when ``timeout`` passes first, after which waiting again is allowed.
        """
        ...

    def is_completed(self) -> bool:
        """Whether the operation is done."""
        ...


class _Done:
    def wait(self, timeout: timedelta | None = None, /) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


DONE: Work = _Done()
"""An operation that is over; all share it."""


class Sum(Work, Protocol):
    """A sum under way."""

    nbytes: int
    """Bytes that each rank sends."""

    def total(self) -> int:
        """The sum, once it is there."""
        ...


class FloatSum(Work, Protocol):
    """A sum of floating-point numbers under way."""

    def total(self) -> float:
        """The sum, once it is there; the same on all ranks, to the bit."""
        ...


class Fold(Protocol[V]):
    """How to put the answers of all ranks together; the same whatever the order of the ranks."""

    def of(self, answer: int, rank: int, /) -> V:
        """What one rank's answer says; it can be pickled."""
        ...

    def combined(self, one: V, other: V, /) -> V:
        """What the answers of two sets of ranks say together."""
        ...


class RollCall(Work, Protocol[V_co]):
    """Asks each rank for a small number, again and again; ``wait`` and ``is_completed`` are of the last call."""

    nbytes: int
    """Bytes that each rank sends in a call."""

    def call(self, number: int, /) -> None:
        """Start a call, in which this rank answers ``number``; the one before must be done."""
        ...

    def result(self) -> V_co:
        """What all ranks answered, folded, after the call is done; the same object if it is what it was before."""
        ...


class Gather(Work, Protocol):
    """A few bytes of each rank, under way."""

    def rows(self) -> list[bytes]:
        """What each rank gave, by rank, once it is there."""
        ...


class Line(ABC):
    """Sums numbers over the ranks of a group: each sum is done before ``depth`` others are started."""

    depth: ClassVar[int] = 1
    """How many sums may be under way at a time."""

    @abstractmethod
    def sum(self, number: int, bits: int) -> Sum:
        """Start summing a number over all ranks.

        Args:
            number: this rank's; neither it nor the sum is negative.
            bits: how many the number has at most, and the sum, too; the same on all ranks.
        """

    @abstractmethod
    def sum_float(self, number: float) -> FloatSum:
        """Start summing a floating-point number of 64 bits over all ranks."""

    @abstractmethod
    def roll_call(self, largest: int, fold: Fold[V]) -> RollCall[V]:
        """A roll call whose answers are at most ``largest``. Each call of it counts as one sum of this line."""

    @abstractmethod
    def gather(self, data: bytes) -> Gather:
        """Start gathering a few bytes of each rank, of the same number on all. That counts as one sum of this line."""

    def restart(self) -> None:
        """Take back what this rank gave to sums that others may not have come to.

        All ranks call it where nothing is under way, and meet afterwards, before they use the line.
        """


class Collective(ABC):
    """The ranks of one group, and what they can do together. Tensors may live on any device the group can carry.

    Once it is set up, a collective has a rank and operations; each raises RuntimeError when it is not, but for one of a
    single process.
    """

    is_set_up = False
    """Whether the ranks are connected."""
    _rank = _world_size = 0

    @abstractmethod
    def setup(self, rank: int, world_size: int) -> None:
        """Connect this rank with the others; all ranks call it.

        Args:
            rank: this rank, from 0.
            world_size: the number of ranks.

        Raises:
            RuntimeError: if it is set up already, or the backend knows a different rank or world size.
            ValueError: if there is no such rank.
        """

    @abstractmethod
    def teardown(self) -> None:
        """Disconnect, after the last operation; all ranks call it. Nothing happens if it is not set up."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        if not self.is_set_up:
            self._check_is_set_up()
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        if not self.is_set_up:
            self._check_is_set_up()
        return self._world_size

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """Start reducing ``tensor`` over all ranks, in place.

        Raises:
            ValueError: if there is no such ``op``, before anything is sent.
        """

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        """Start copying ``tensor`` of rank ``source`` into that of every other rank, in place.

        Raises:
            ValueError: if there is no such rank, before anything is sent.
        """

    @abstractmethod
    def all_gather_into(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor]) -> Work:
        """Start copying ``tensor`` of every rank into ``outputs``, which are in rank order.

        Args:
            tensor: of the same shape and dtype on all ranks.
            outputs: one for each rank, contiguous, of the shape, dtype and device of ``tensor``.

        Raises:
            ValueError: if ``outputs`` are not, before anything is sent.
        """

    @abstractmethod
    def set(self, key: str, value: str) -> None:
        """Put a text into the store, seen by all ranks."""

    @abstractmethod
    def get(self, key: str) -> str:
        """Read a text from the store, waiting until it is there."""

    @abstractmethod
    def check(self, key: str) -> bool:
        """Whether the store has ``key``."""

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add to a counter in the store and return its new value."""

    _blocks = 0

    @property
    def agreed(self) -> dict[int, Any]:
        """What ranks have agreed on in earlier blocks, by the digest of what these were entered with (``join.block``).

        The same on all ranks. The first block finds nothing here.
        """
        return vars(self).setdefault("_agreed", {})

    def next_block(self) -> int:
        """The number of the next ``Join`` block on this group; the same on all ranks, since they enter in one order."""
        self._blocks += 1
        return self._blocks

    def companion(self) -> Collective:
        """The same ranks once more, whose operations do not mix with this one's; the same at every call.

        All ranks call it, in the same order among their operations the first time. A backend that has no second one
        returns this one.
        """
        return self

    def line(self, number: int = HEADERS) -> Line:
        """A line for headers or the like, the same one for a number at every call.

        Args:
            number: ``HEADERS``, ``ROLL_CALLS`` or ``BARRIERS``. Lines may be used at the same time: what is started on
                several of them is, on all ranks, in the same order. Where a backend has a companion, none of them mixes
                with this one's operations. ``SUMS`` is for sums made amid these, in one order with them on all ranks,
                after all have asked for another line.
        """
        return GroupLine(self if number == SUMS else self.companion())

    @abstractmethod
    def board(self) -> Board:
        """Where ranks post notes for each other: in the store, or in memory that :meth:`line` found to be shared."""

    def issued(self) -> int:
        """How many operations of the group were started on this rank, by whomever; 0 where nobody counts them."""
        return 0

    def limit(self, timeout: timedelta) -> timedelta | None:
        """Let operations of the group that take longer than ``timeout`` break, where that is known how.

        Returns:
            What it was before; ``None`` if nothing was changed.
        """
        return None

    @property
    def keeps_store(self) -> bool:
        """Whether one of the ranks keeps the store in which they post notes."""
        return True

    def abort(self, *, connections: bool = False) -> bool:
        """Abort what this process has under way on its accelerator with others, which may never come to its end.

        Called in any thread, once a rank has failed: the process groups of this process cannot be used any more.

        Args:
            connections: whether to close those of this group, too, so that the other ranks do not wait for this one:
                where not all ranks have failed at the same place.

        Returns:
            Whether there are groups to abort on accelerators.
        """
        return False

    def hold(self) -> None:
        """Never run the group's destructor, which would wait for an operation that no other rank joins."""

    @final
    def broadcast_object(self, value: Any, source: int) -> Any:
        """Return rank ``source``'s ``value`` on every rank; it is pickled.

        Raises:
            RuntimeError: on every rank, if ``source`` cannot pickle it.
            ValueError: if there is no such rank.
        """
        self._check_source(source)
        data, ok = _pickled(value) if self.rank == source else (bytearray(), True)
        head = torch.tensor([len(data), ok], dtype=torch.int64, device="cpu")
        self.broadcast(head, source).wait()
        size, ok = int(head[0]), bool(head[1])
        data = data or bytearray(size)
        self.broadcast(torch.frombuffer(data, dtype=torch.uint8), source).wait()
        if not ok:
            raise RuntimeError(
                f"rank {source} cannot pickle what it should broadcast: {data.decode()}; send what pickle takes [J024]"
            )
        return value if self.rank == source else pickle.loads(data)

    @final
    @torch.no_grad()
    def all_gather(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Return ``tensor`` of every rank, in rank order.

        Args:
            tensor: of the same shape and dtype on all ranks.
            outputs: what to fill and return, one for each rank and like ``tensor``; new tensors if not given.

        Raises:
            ValueError: if ``outputs`` are of another number, shape, dtype or device, before anything is sent.
        """
        if outputs is None:
            outputs = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.world_size)]
        received = [output.contiguous() for output in outputs]  # most of them are, and these are themselves
        self.all_gather_into(tensor, received).wait()
        for output, gathered in zip(outputs, received, strict=True):
            if output is not gathered:
                output.copy_(gathered)
        return list(outputs)

    @final
    @torch.no_grad()
    def all_gather_uneven(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return ``tensor`` of every rank, in rank order; the sizes may differ in every dimension.

        All ranks send as much as the largest one has.

        Raises:
            ValueError: on every rank, if dtypes or numbers of dimensions differ.
        """
        shapes: list[tuple[torch.dtype, tuple[int, ...]]] = self.all_gather_object((tensor.dtype, tuple(tensor.shape)))
        if len({(dtype, len(shape)) for dtype, shape in shapes}) > 1:
            given = ", ".join(f"rank {rank} {describe(dtype, shape)}" for rank, (dtype, shape) in enumerate(shapes))
            raise ValueError(f"ranks must gather tensors of one dtype and number of dimensions, not {given} [J025]")
        sizes = [torch.Size(shape).numel() for _, shape in shapes]
        padded = tensor.new_zeros(max(sizes))
        padded[: tensor.numel()] = tensor.reshape(-1)
        received = self.all_gather(padded) if max(sizes) else [padded] * self.world_size
        # Cloned, since the padding would otherwise live as long as what was received.
        return [flat[:size].clone().view(shape) for flat, size, (_, shape) in zip(received, sizes, shapes, strict=True)]

    @final
    def all_gather_object(self, value: Any) -> list[Any]:
        """Return ``value`` of every rank, in rank order; it is pickled.

        Raises:
            RuntimeError: on every rank, if one of them cannot pickle it.
        """
        data, ok = _pickled(value)
        heads = self.all_gather(torch.tensor([len(data), ok], dtype=torch.int64, device="cpu"))
        sizes = [int(head[0]) for head in heads]
        data.extend(bytes(max(sizes) - len(data)))
        received = [bytearray(max(sizes)) for _ in sizes]
        outputs = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in received]
        self.all_gather(torch.frombuffer(data, dtype=torch.uint8), outputs)
        texts = [buffer[:size] for buffer, size in zip(received, sizes, strict=True)]
        failed = [f"rank {rank}: {texts[rank].decode()}" for rank, head in enumerate(heads) if not head[1]]
        if failed:
            raise RuntimeError(
                f"not every rank can pickle what it should send: {', '.join(failed)}; send what pickle takes [J026]"
            )
        return [value if rank == self.rank else pickle.loads(text) for rank, text in enumerate(texts)]

    @final
    @torch.no_grad()
    def reduce(self, tensor: torch.Tensor, op: ResultOp = "mean") -> torch.Tensor:
        """Return the elementwise ``op`` over all ranks, on every rank; ``tensor`` stays as it is.

        Args:
            tensor: of the same shape and dtype on all ranks. Booleans are counted by ``"sum"``, in int64.
            op: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``.

        Raises:
            ValueError: if there is no such ``op``, before anything is sent.
            TypeError: for the mean of integers or booleans, before anything is sent: convert them to the float type
                that is wanted.
        """
        check_op(op, get_args(ResultOp))
        if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise TypeError(
                f"the mean of {tensor.dtype} is not of that type: reduce tensor.float(), or op='sum' [J027]"
            )
        # Not every backend reduces booleans, and where they are summed they are not counted.
        counted = tensor.dtype == torch.bool
        result = tensor.to(torch.int64) if counted else tensor.clone(memory_format=torch.contiguous_format)
        self.all_reduce(result, "sum" if op == "mean" else op).wait()
        if op == "mean":
            return result.div_(self.world_size)
        return result.bool() if counted and op != "sum" else result

    @final
    def barrier(self) -> None:
        """Wait until all ranks have come here."""
        self.all_reduce(torch.zeros(1, device="cpu")).wait()

    @final
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks decided so, or with ``all=False`` any of them; the same on every rank."""
        vote = torch.tensor([int(decision)], device="cpu")
        self.all_reduce(vote, "min" if all else "max").wait()
        return bool(vote.item())

    # -- for backends -------------------------------------------------------------------------------------------------

    @final
    def _check_setup(self, rank: int, world_size: int) -> None:
        if self.is_set_up:
            raise RuntimeError(
                f"{type(self).__name__} is set up already: call teardown() before another setup() [J028]"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} is not one of world_size={world_size} ranks; they are counted from 0 [J029]")

    @final
    def _take_place(self, rank: int, world_size: int, own_rank: int, own_world_size: int) -> None:
        """Be this rank of so many, and set up, unless the backend knows another rank or world size."""
        if (rank, world_size) != (own_rank, own_world_size):
            raise RuntimeError(
                f"setup(rank={rank}, world_size={world_size}) contradicts the backend of {type(self).__name__}, which"
                f" says rank {own_rank} of {own_world_size}; call setup() with that [J030]"
            )
        self._rank, self._world_size, self.is_set_up = rank, world_size, True

    def _check_is_set_up(self) -> None:
        """Raise a ``RuntimeError`` if the ranks are not connected, and need to be."""

    @final
    def _check_source(self, source: int) -> None:
        if not 0 <= source < self.world_size:
            raise ValueError(f"source={source} is not a rank of this group: they are 0 to {self.world_size - 1} [J031]")

    @final
    def _check_outputs(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
        if len(outputs) != self.world_size:
            raise ValueError(f"{len(outputs)} outputs given: give one for each of {self.world_size} ranks [J032]")
        wanted = (tensor.dtype, tensor.shape, tensor.device)
        for rank, output in enumerate(outputs):
            if (output.dtype, output.shape, output.device) != wanted:
                raise ValueError(
                    f"the output for rank {rank} is {describe(output.dtype, output.shape)} on {output.device}, but the"
                    f" tensor {describe(tensor.dtype, tensor.shape)} on {tensor.device}; make it like that [J033]"
                )
            if not output.is_contiguous():
                raise ValueError(
                    f"the output for rank {rank} is not contiguous; make it so, or use all_gather() [J034]"
                )


class GroupLine(Line):
    """A line over a collective: each sum is an all-reduce, in one order with all others on it."""

    depth = 2

    def __init__(self, collective: Collective) -> None:
        self._collective = collective

    @override
    def sum(self, number: int, bits: int) -> Sum:
        # Of several words, all but the last need room for what is to be carried.
        size = _WORD_BITS if bits <= _WORD_BITS else _WORD_BITS - self._collective.world_size.bit_length()
        mask = (1 << size) - 1
        words = torch.tensor([number >> shift & mask for shift in range(0, bits, size)], device="cpu")
        return _GroupSum(self._collective.all_reduce(words), words, size)

    @override
    def sum_float(self, number: float) -> FloatSum:
        total = torch.tensor(number, dtype=torch.float64, device="cpu")
        return _GroupFloatSum(self._collective.all_reduce(total), total)

    @override
    def roll_call(self, largest: int, fold: Fold[V]) -> RollCall[V]:
        return _GroupRollCall(self, self._collective.rank, self._collective.world_size, largest, fold)

    @override
    def gather(self, data: bytes) -> Gather:
        return _GroupGather(self._collective, data)


class _GroupGather:
    """An all-gather of bytes."""

    def __init__(self, collective: Collective, data: bytes) -> None:
        self._data, self._size = bytearray(collective.world_size * len(data)), len(data)
        rows = cast("Sequence[torch.Tensor]", torch.frombuffer(self._data, dtype=torch.uint8).split(self._size))
        work = collective.all_gather_into(torch.frombuffer(bytearray(data), dtype=torch.uint8), rows)
        self.wait, self.is_completed = work.wait, work.is_completed

    def rows(self) -> list[bytes]:
        return [bytes(self._data[begin : begin + self._size]) for begin in range(0, len(self._data), self._size)]


class _GroupSum:
    """An all-reduce of words of some bits each."""

    def __init__(self, work: Work, words: torch.Tensor, size: int) -> None:
        self.wait, self.is_completed, self.nbytes = work.wait, work.is_completed, words.nbytes
        self._words, self._size = words, size

    def total(self) -> int:
        return sum(word << place * self._size for place, word in enumerate(cast("list[int]", self._words.tolist())))


class _GroupFloatSum:
    """An all-reduce of one number."""

    def __init__(self, work: Work, number: torch.Tensor) -> None:
        self.wait, self.is_completed = work.wait, work.is_completed
        self.total = number.item


class _GroupRollCall(Generic[V]):
    """A roll call in which a call is one sum: each rank fills bits of its own.

    For 31 ranks and answers up to 3, the largest that a rank may give, the sum has 62 bits.
    """

    def __init__(self, line: Line, rank: int, world_size: int, largest: int, fold: Fold[V]) -> None:
        self._fold, self._answers = fold, list[int]()
        self._result: V
        self._line, self._size, self._world_size = line, largest.bit_length(), world_size
        self._shift, self._bits = rank * self._size, world_size * self._size
        self.nbytes = 0

    def call(self, number: int, /) -> None:
        self._sum = self._line.sum(number << self._shift, self._bits)
        self.wait, self.is_completed, self.nbytes = self._sum.wait, self._sum.is_completed, self._sum.nbytes

    def result(self) -> V:
        total, mask = self._sum.total(), (1 << self._size) - 1
        answers = [total >> self._size * rank & mask for rank in range(self._world_size)]
        if answers != self._answers:
            self._answers, self._result = answers, folded(self._fold, answers)
        return self._result


def folded(fold: Fold[V], answers: Sequence[int]) -> V:
    """What these answers, by rank, say together."""
    return reduce(fold.combined, (fold.of(answer, rank) for rank, answer in enumerate(answers)))


def check_op(op: str, known: tuple[str, ...] = get_args(ReduceOp)) -> None:
    """Raise a ``ValueError`` for an ``op`` that is not known."""
    if op not in known:
        raise ValueError(f"unknown op {op!r}: give one of {', '.join(map(repr, known))} [J035]")


def exact(number: float) -> Exact:
    """``number`` as one whose sums do not depend on their order; infinities and NaN as they are."""
    if number.is_integer():
        return int(number)
    return Fraction(number) if math.isfinite(number) else number


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, flat: what is only copied can travel so, whatever dtypes a backend knows."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # a single element has any stride


def describe(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """A tensor in short, like ``float32[2, 3]``."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _pickled(value: Any) -> tuple[bytearray, bool]:
    """``value`` pickled, or why that is impossible, and which of the two it is."""
    try:
        return bytearray(pickle.dumps(value)), True
    except Exception as unpicklable:
        return bytearray(f"{type(unpicklable).__name__}: {unpicklable}".encode()), False

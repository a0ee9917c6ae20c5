"""Board on which ranks leave messages for each other without a collective: :class:`Board`.

A rank that fails leaves a :class:`Note` with the reason. A rank that waits for others may ring a bell; after that, all
ranks post their :class:`Progress` at intervals. Reading and writing may block if a store cannot be reached, so a thread
of its own does it (``join.failure.guard``).
"""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, cast, get_args

import torch.distributed as dist
from typing_extensions import final, override

from join.collectives.timeouts import TIMEOUTS

Kind: TypeAlias = Literal["note", "progress"]
"""Kind of a message: a note, or the progress of a rank."""
# The longest texts that fit into a message, for which shared memory has a fixed size.
_MOST_CHARACTERS = {"text": 3400, "kind": 100, "doing": 350, "burst": 100, "place": 350, "call": 100}


class Note(NamedTuple):
    """Reason why a rank leaves its block.

    Attributes:
        rank: The rank.
        cause: The rank that failed first, as far as this rank knows; ``rank`` itself if it did not fail because of
            another.
        kind: The class of the exception of the rank that failed first.
        text: The message for the other ranks: the rank that failed first, and its exception.
    """

    rank: int
    cause: int
    kind: str
    text: str


class Progress(NamedTuple):
    """Progress of a rank in its block.

    Attributes:
        headers: The number of headers that the rank has sent.
        loop: The number of the loop in lockstep that the rank is in, or was in last; 0 before the first.
        step: The number of steps of that loop that the rank has reached.
        bursts: The number of bursts that the rank has reached in that loop.
        burst: The name of the last one.
        issued: The number of collectives that any caller started on the process group in that loop.
        left: Whether the rank has left that loop before its end.
        doing: The current activity of the rank, in words.
        heard: The number of notes from other ranks that the rank has read.
        beat: The number of times that the rank has posted its progress.
        done: Whether the rank has left the block. Other ranks then expect nothing from it, and its process may end.
        place: The activity of the rank in words, and the line of the user's code. A rank that moves has no line.
        kind: ``"waits"`` for the other ranks, ``"calls"`` a collective, ``"works"`` in other code, or ``"rests"`` in a
            line that may do either, such as one that reads a device.
        call: The collective that it calls, in words.
        still: The seconds since the rank last moved, as ``join.failure.wait`` counts them.
    """

    headers: int = 0
    loop: int = 0
    step: int = 0
    bursts: int = 0
    burst: str = ""
    issued: int = 0
    left: bool = False
    doing: str = ""
    heard: int = 0
    beat: int = 0
    done: bool = False
    place: str = ""
    kind: str = ""
    call: str = ""
    still: float = 0.0

    def moved(self) -> Progress:
        """Return the part that changes only if the rank moves."""
        return self._replace(heard=0, beat=0, place="", kind="", call="", still=0.0)


class Board(ABC):
    """Messages that the ranks of a group have left in the open block."""

    outlives: ClassVar[bool] = True
    """Whether the message of a rank remains readable after its process has ended."""
    of_ranks = True
    """Whether one of the ranks keeps it, so that a lost board means a lost rank."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.block = 0
        """Number of the open block, which is positive and equal on all ranks. Messages of other blocks are ignored."""

    @final
    def post(self, note: Note, block: int | None = None) -> None:
        """Leave a note, which replaces this rank's last one, and ring the bell.

        Args:
            note: The note.
            block: The number of the block that it is about; by default the open one.
        """
        note = note._replace(kind=_fit("kind", note.kind), text=_fit("text", note.text))
        self._put("note", json.dumps(note, ensure_ascii=False), self.block if block is None else block)
        self.ring()

    @final
    def notes(self) -> list[Note]:
        """Return the notes of all ranks, in rank order."""
        return sorted(Note(*values) for values in self._read("note", _NOTE))

    @final
    def tell(self, progress: Progress, block: int | None = None) -> None:
        """Post the progress of this rank; ``block`` is as for :meth:`post`."""
        texts = {
            part: _fit(part, value) for part, value in progress._asdict().items() if value and part in _MOST_CHARACTERS
        }
        text = json.dumps((self.rank, *progress._replace(**texts)), ensure_ascii=False)
        self._put("progress", text, self.block if block is None else block)

    @final
    def progress(self) -> dict[int, Progress]:
        """Return the last posted progress of each rank, by rank."""
        return {rank: Progress(*values) for rank, *values in self._read("progress", _PROGRESS)}

    def _read(self, kind: Kind, types: list[type]) -> Iterator[list[Any]]:
        """Yield the values of each message of a kind. Other programs may write into a store, too."""
        for text in self._messages(kind):
            with suppress(ValueError, TypeError, RecursionError):
                values: list[Any] = json.loads(text)
                if [*map(type, values)] == types and values[0] in range(self.world_size):
                    yield [_fit("text", value) if isinstance(value, str) else value for value in values]

    @abstractmethod
    def ring(self) -> None:
        """Ask all ranks to post their progress."""

    @abstractmethod
    def is_rung(self) -> bool:
        """Return whether a rank has rung the bell."""

    def ended(self) -> list[int]:
        """Return the other ranks whose processes are known to have ended."""
        return []

    @abstractmethod
    def _put(self, kind: Kind, text: str, block: int) -> None:
        """Write this rank's message of a kind, in the block of this number, over its last one."""

    @abstractmethod
    def _messages(self, kind: Kind) -> list[str]:
        """Return the messages of a kind from all ranks that have left one."""


_NOTE, _PROGRESS = [int, int, str, str], [int, *map(type, Progress())]


def printable(text: str) -> str:
    """Return ``text`` with question marks for the characters that a terminal or UTF-8 may not show.

    The text of an exception may have any character, including a lone surrogate.
    """
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)


def _fit(part: str, text: str) -> str:
    longest, text = _MOST_CHARACTERS[part], printable(text)
    return text if len(text) <= longest else f"{text[: longest - 4]} ..."


class StoreBoard(Board):
    """Board in a store that all ranks can reach. The store may end with the process of the rank that hosts it.

    The board opens a connection of its own when it is first used. On the connection of the process group, a caller that
    waits for a key blocks all others.
    """

    outlives = False

    def __init__(self, rank: int, world_size: int, store: dist.Store, *, of_ranks: bool = True) -> None:
        super().__init__(rank, world_size)
        self.of_ranks = of_ranks
        self._shared_store, self._own_store, self._connecting = store, None, threading.Lock()
        self._watched = (rank - 1) % world_size  # the rank whose beats this rank reads; another rank reads its own
        self._next_beat = 0.0
        self._beats = 0  # written by this rank
        self._last_beat, self._unheard = list[str](), 0  # of the watched rank, and how many own beats it has stayed

    @property
    def _store(self) -> Any:  # clone() and multi_get() are not in torch's type stubs
        with self._connecting:
            if self._own_store is None:
                store = cast("Any", self._shared_store).clone()
                for kind in get_args(Kind):  # so that one request can read the messages of all ranks
                    store.set(_key_of(kind, self.rank), "")
                self._own_store = store
            return self._own_store

    @override
    def ring(self) -> None:
        self._store.set(_key_of("bell", self.block), "")

    @override
    def is_rung(self) -> bool:
        return self._store.check([_key_of("bell", self.block)])

    @override
    def ended(self) -> list[int]:
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + TIMEOUTS.beat
            self._beats += 1
            self._put("beat", str(self._beats), self.block)
            beat = self._messages("beat", [self._watched])  # empty if that rank has not entered the block yet
            # The time is counted in beats of this rank, not in seconds, because all ranks may have been suspended.
            self._unheard = self._unheard + 1 if beat and beat == self._last_beat else 0
            self._last_beat = beat
        return [self._watched] if self._unheard * TIMEOUTS.beat >= TIMEOUTS.silent else []

    @override
    def _put(self, kind: Kind | Literal["beat"], text: str, block: int) -> None:
        self._store.set(_key_of(kind, self.rank), f"{block} {text}")

    @override
    def _messages(self, kind: Kind | Literal["beat"], ranks: Sequence[int] | None = None) -> list[str]:
        """Return the messages of these ranks, or of all, in this block, with two requests for any number of ranks."""
        keys = [_key_of(kind, rank) for rank in (range(self.world_size) if ranks is None else ranks)]
        if not self._store.check(keys):  # some rank has not entered a block yet
            keys = [key for key in keys if self._store.check([key])]
        texts = [value.decode(errors="replace") for value in self._store.multi_get(keys)] if keys else []
        block = f"{self.block} "
        return [text.removeprefix(block) for text in texts if text.startswith(block)]


class LocalBoard(StoreBoard):
    """Board that only this rank reads, as long as it shares none with other ranks."""

    outlives = True

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size, dist.HashStore())


def _key_of(kind: str, number: int) -> str:
    # The number of a rank, the same in all blocks, so that the number of keys stays bounded; for a bell, of the block.
    return f"board/{kind}/{number}"

"""What ranks leave for each other to find, where no collective is needed: :class:`Board`.

A rank that fails leaves a :class:`Note` that says why. A rank that waits for others may ring a bell; from then on all
ranks tell now and then how far they are (:class:`Progress`). Reading and writing may block where a store cannot be
reached, so it is the business of a thread of its own: ``join.failure.peers``.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, cast, get_args

import torch.distributed as dist
from typing_extensions import final, override

from join.collectives.timeouts import timeouts

Kind: TypeAlias = Literal["note", "progress"]
"""What a message is: a note, or how far a rank is."""
# The length of a part of a message, which must have room in memory of a fixed size.
_MOST_CHARACTERS = {"text": 3400, "kind": 100, "doing": 350, "burst": 100}


class Note(NamedTuple):
    """Why a rank leaves its block.

    Attributes:
        rank: the rank.
        cause: the rank that failed first, as far as this one knows: itself, if it did not fail because of another.
        kind: the class of the exception of that rank.
        text: what there is to tell the others: the rank that failed first, and its exception.
    """

    rank: int
    cause: int
    kind: str
    text: str


class Progress(NamedTuple):
    """How far a rank is in its block.

    Attributes:
        headers: how many headers it has sent.
        loop: the number of the loop in lockstep that it is in, or was in last; 0 before the first.
        step: how many steps of that loop it has come to.
        bursts: how many bursts it has come to in that loop,
        burst: and the name of the last one.
        issued: how many collectives were started on the process group in that loop, by whomever.
        left: whether it has left that loop before its end.
        doing: what it does, in words.
        heard: how many notes of others it has read.
        beat: how often it has told.
        done: whether it has left the block: it owes the others nothing, and its process may end.
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


class Board(ABC):
    """What the ranks of a group have left in the block that is open."""

    outlives: ClassVar[bool] = True
    """Whether what a rank has left is there after its process has ended."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.block = 0

    @final
    def begin(self, block: int) -> None:
        """Begin the block of this number (above 0, the same on all ranks): what was posted earlier does not count."""
        self.block = block

    @final
    def post(self, note: Note) -> None:
        """Leave a note, in the place of this rank's last one, and ring the bell."""
        note = note._replace(kind=_fit("kind", note.kind), text=_fit("text", note.text))
        self._put("note", json.dumps(note, ensure_ascii=False))
        self.ring()

    @final
    def notes(self) -> list[Note]:
        """The notes that ranks have left, by rank."""
        return sorted(Note(*json.loads(text)) for text in self._messages("note"))

    @final
    def tell(self, progress: Progress) -> None:
        """Tell how far this rank is."""
        progress = progress._replace(burst=_fit("burst", progress.burst), doing=_fit("doing", progress.doing))
        self._put("progress", json.dumps((self.rank, progress), ensure_ascii=False))

    @final
    def progress(self) -> dict[int, Progress]:
        """What the ranks have told last, by rank."""
        messages = map(json.loads, self._messages("progress"))
        return {rank: Progress(*progress) for rank, progress in messages}

    @abstractmethod
    def ring(self) -> None:
        """Ask all ranks to tell how far they are."""

    @abstractmethod
    def is_rung(self) -> bool:
        """Whether somebody has asked."""

    def ended(self) -> list[int]:
        """The other ranks whose processes are known to have ended."""
        return []

    @abstractmethod
    def _put(self, kind: Kind, text: str) -> None:
        """Put down this rank's message of a kind, in the place of its last one."""

    @abstractmethod
    def _messages(self, kind: Kind) -> list[str]:
        """The messages of a kind that are there, of all ranks."""


def _fit(part: str, text: str) -> str:
    most = _MOST_CHARACTERS[part]
    # An exception's text may have anything in it.
    text = "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)
    return text if len(text) <= most else f"{text[: most - 4]} ..."


class StoreBoard(Board):
    """In a store that all ranks can reach, which may end with the process of the rank that keeps it.

    A connection of its own is made to it, when it is first used: over one that is shared, whoever waits for a key holds
    up the others.
    """

    outlives = False

    def __init__(self, rank: int, world_size: int, store: dist.Store) -> None:
        super().__init__(rank, world_size)
        self._shared_store = store
        self._before = (rank - 1) % world_size  # whose beats this rank listens to, as another does to its own
        self._next_beat = 0.0
        self._beats = 0  # how often this rank has said that it lives
        self._heard, self._unheard = list[str](), 0  # what that rank has said last; for how many beats nothing else

    @cached_property
    def _store(self) -> Any:  # clone() and multi_get() are not in torch's type stubs
        store = cast("Any", self._shared_store).clone()
        for kind in get_args(Kind):  # so that all of them can be asked for at once
            store.set(_key_of(kind, self.rank), "")
        return store

    @property
    def _bell(self) -> str:
        return f"board/{self.block}/bell"

    @override
    def ring(self) -> None:
        self._store.set(self._bell, "")

    @override
    def is_rung(self) -> bool:
        return self._store.check([self._bell])

    @override
    def ended(self) -> list[int]:
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + timeouts().beat
            self._beats += 1
            self._put("beat", str(self._beats))
            heard = self._put_by("beat", [self._before])  # nothing, if it has not entered yet
            # In beats of this rank's own, not in seconds: all ranks may have been suspended.
            self._unheard = self._unheard + 1 if heard and heard == self._heard else 0
            self._heard = heard
        return [self._before] if self._unheard * timeouts().beat >= timeouts().silent else []

    @override
    def _put(self, kind: Kind | Literal["beat"], text: str) -> None:
        self._store.set(_key_of(kind, self.rank), f"{self.block} {text}")

    @override
    def _messages(self, kind: Kind) -> list[str]:
        return self._put_by(kind, range(self.world_size))

    def _put_by(self, kind: Kind | Literal["beat"], ranks: Sequence[int]) -> list[str]:
        """What these ranks have put down in this block: two requests, however many ranks there are."""
        keys = [_key_of(kind, rank) for rank in ranks]
        if not self._store.check(keys):  # not all have ever entered a block
            keys = [key for key in keys if self._store.check([key])]
        texts = [value.decode() for value in self._store.multi_get(keys)] if keys else []
        block = f"{self.block} "
        return [text.removeprefix(block) for text in texts if text.startswith(block)]


def _key_of(kind: str, rank: int) -> str:
    return f"board/{kind}/{rank}"  # the same in all blocks, so that no keys are left

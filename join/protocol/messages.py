"""Messages between the ranks of a block: :class:`Messages`. Every message begins with one sum, which says its kind.

Ranks that do different things must not mistake each other's messages. So wherever ranks may meet, each adds a number of
the same size, and the lowest counter of the sum is the number of ranks that are *not* at a header::

    a header                 0 | counters of the header (``join.protocol.headers``)
    any other message        1 | votes | first | signature | more

The *signature* is a digest of what the rank is doing, and of all that has to be equal on all ranks: the objects and
arguments of a block, the values of their state. If it is equal, its sum is ``world_size`` times the own signature.
*Votes* counts the ranks that vote, and *first* is 1 if a certain rank does. *More* is for roll calls (``join.rounds``).
Rows of bytes follow only where the sum shows that all ranks are in one place, so they always have the same size.

Headers, roll calls and the message of a block that the group has had before are read late. All other messages are
awaited. A difference is found by reading::

    in one place                              in different places
    ------------                              -------------------
    rank a           rank b                   rank a: at a header      rank b: enters a block
    sum              sum                      sum                      sum
    signatures differ: a second sum, ``_COMPARES``                     awaits it: rank a is at a header
    all compare: gather of all values         awaits its header, or    ProtocolError, and a note, which
    all raise the same error                  finds the note: an error names what each rank does
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache, reduce
from typing import NamedTuple, NoReturn

from join.agreement import Values, digest, digest_of, raise_difference
from join.collectives import Collective, Line, Sum
from join.collectives.timeouts import TIMEOUTS
from join.errors import ProtocolError
from join.failure.guard import Guard

WORD = 63
"""Number of bits of the shortest message: an int64 without its sign."""
_COMPARES = "compares what ranks do"

_digest = lru_cache(maxsize=256)(digest)


class Answer(NamedTuple):
    """Sum of a message that is not a header.

    Attributes:
        is_same: Whether the signatures of all ranks are equal.
        votes: The number of ranks that vote.
        first: Whether the first rank votes.
        more: The sum of the further numbers.
    """

    is_same: bool
    votes: int
    first: bool
    more: int


class Message(NamedTuple):
    """Message that is not a header, which this rank has started.

    Attributes:
        doing: What this rank does, as a predicate.
        parts: Texts that are equal on all ranks, such as the arguments of a block.
        values: Values that are equal on all ranks.
        bits: The size of the message.
        signature: The digest of all this.
        work: The sum over all ranks.
    """

    doing: str
    parts: Sequence[str]
    values: Values
    bits: int
    signature: int
    work: Sum[int]


class Messages:
    """Messages of one process group, in one order on all ranks.

    Args:
        collective: The ranks.
        guard: The guard that waits for them.
    """

    line: Line  # since all ranks have entered the first block of the group

    def __init__(self, collective: Collective, guard: Guard) -> None:
        self._collective, self._guard = collective, guard
        count = collective.world_size.bit_length()
        self._count, self._largest_count = count, (1 << count) - 1
        self._signed_at = 2 * count + 1
        self._largest_signature = (1 << WORD - count - self._signed_at) - 1
        self._bits_of_header = self._bits_of_loop = self.bits = WORD

    def resize(self, *, header: int | None = None, loop: int | None = None) -> None:
        """Set the bits of a header, or of a roll call; called in the same place on all ranks.

        All messages have the same size, so that a message never meets one of another size.
        """
        self._bits_of_header = header or self._bits_of_header
        self._bits_of_loop = self._bits_of_loop if loop is None else loop
        self.bits = max(WORD, self._bits_of_header, self._bits_of_loop)

    # -- a sum --------------------------------------------------------------------------------------------------------

    def start(
        self,
        doing: str,
        parts: Sequence[str] = (),
        values: Values = (),
        *,
        vote: bool = False,
        first: bool = False,
        more: int = 0,
        bits: int | None = None,
    ) -> Message:
        """Start a message that is not a header.

        Args:
            doing: What this rank does, as a predicate. All ranks do the same.
            parts: Texts that are equal on all ranks.
            values: Values that are equal on all ranks.
            vote: Whether this rank votes.
            first: Whether this is the first rank, and votes; true on one rank at most.
            more: Further numbers, whose sum needs ``bits - WORD`` bits.
            bits: The size of the message, if it is not the present one.
        """
        whole = digest_of(values, [doing, *parts]) if parts or values else _digest(doing)
        signature = whole & self._largest_signature
        number = 1 | vote << self._count | first << 2 * self._count | signature << self._signed_at | more << WORD
        bits = bits or self.bits
        return Message(doing, parts, values, bits, signature, self.line.sum(number, bits))

    def read(self, message: Message, doing: str = "") -> Answer:
        """Wait for a message, and return its sum.

        Args:
            message: The message.
            doing: What this rank does, for the errors of other ranks, if that is more than ``message.doing``.

        Raises:
            ProtocolError: If another rank is at a header.
            PeerError, JoinTimeoutError: As ``Guard.wait`` does.
        """
        total: int = self._guard.wait(message.work, doing or message.doing, message.work.total)
        if total & self._largest_count != self._collective.world_size:
            self.raise_apart(doing or message.doing)
        signatures = total >> self._signed_at & (1 << WORD - self._signed_at) - 1
        return Answer(
            signatures == self._collective.world_size * message.signature,
            total >> self._count & self._largest_count,
            bool(total >> 2 * self._count & 1),
            total >> WORD,
        )

    def check(self, message: Message, doing: str = "") -> Answer:
        """Wait for a message, and check that all ranks have sent the same; ``doing`` is as for :meth:`read`.

        Raises:
            ProtocolError: If they have not. All ranks raise it, and may continue to use the group.
        """
        if message.parts:
            doing = f"{message.doing} with {', '.join(message.parts)}"
        answer = self.read(message, doing)
        if not answer.is_same:
            self._raise_difference(message, doing or message.doing)
        return answer

    # -- rows ---------------------------------------------------------------------------------------------------------

    def gather(self, data: bytes, doing: str = "") -> list[bytes]:
        """Return the bytes of each rank, equally many from each, after a message that all ranks have read.

        Args:
            data: The bytes of this rank.
            doing: What this rank does, for the errors of other ranks.
        """
        work = self.line.gather(data)
        return self._guard.wait(work, doing, work.total)

    def gather_numbers(self, number: int, doing: str = "") -> list[int]:
        """Return a number of each rank, as :meth:`gather` does."""
        return [struct.unpack("<q", row)[0] for row in self.gather(struct.pack("<q", number), doing)]

    # -- differences --------------------------------------------------------------------------------------------------

    def raise_apart(self, doing: str = "") -> NoReturn:
        """Raise an error because another rank does something else than this one, and post it.

        Args:
            doing: What this rank does, as a predicate; by default, what its progress says.
        """
        self._guard.doing = doing  # for the other ranks, which ask for it, too
        self._guard.look_around(TIMEOUTS.note)  # an error that says more than this one may be on its way
        said = self._guard.ask(limit=TIMEOUTS.note) | {self._collective.rank: self._guard.progress()}
        places = "; ".join(f"rank {rank} {place.doing.partition(' with ')[0]}" for rank, place in sorted(said.items()))
        self._guard.post_and_raise(
            ProtocolError(
                f"Ranks are in different places, so their messages do not belong together ({places}). Enter blocks and"
                " loops over join.iterate, and run bursts, in the same order on all ranks. For a block inside a loop of"
                " different lengths, loop over join.iterate. [J810]"
            )
        )

    def _raise_difference(self, message: Message, doing: str) -> None:
        """Raise an error that names the difference between ranks; return if it is only rounding."""
        if not self.read(self.start(_COMPARES, bits=message.bits), doing).is_same:
            self.raise_apart(doing)
        rows = self._collective.all_gather_object([message.doing, list(message.parts), message.values], plain=True)
        if any(theirs != message.doing for theirs, _, _ in rows):
            self.raise_apart(doing)
        by_rank: list[list[str]] = [parts for _, parts, _ in rows]
        if all(theirs == by_rank[0] for theirs in by_rank):
            return raise_difference(dict(enumerate(values for _, _, values in rows)))
        common = reduce(Counter[str].__and__, map(Counter, by_rank))
        own = [list((Counter(entered) - common).elements()) for entered in by_rank]
        ranks_of: dict[str, list[int]] = {}
        for rank, entered in enumerate(own if any(own) else by_rank):  # if no rank has its own, the order differs
            ranks_of.setdefault(", ".join(entered) or "nothing more", []).append(rank)
        texts = "; ".join(f"ranks {ranks}: {entered}" for entered, ranks in ranks_of.items())
        differences = "different objects or arguments" if any(own) else "the same objects, whose order differs"
        raise ProtocolError(
            f"The ranks {message.doing} with {differences} ({texts}). Pass the same objects, in the same order, and the"
            " same arguments on all ranks. [J020]"
        )

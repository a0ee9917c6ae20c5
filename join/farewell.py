"""The ranks of a loop that ends early come to the same number of bursts: :class:`Farewell`.

A rank that has left the loop shadows the bursts of the others. Where ranks keep notes, which they do on one machine, it
sees what they have begun. Else it goes by what it knows of the body, and cannot see whether they come to it: so it may
be in a burst that nobody else runs when the others learn that it has left, and run no more; or another may be in one
that it did not expect. Therefore all ranks tell in the store, where no collective is needed, how many bursts they have
begun, and begin those of the one that is furthest::

    rank that has left                           rank that goes on
    ------------------                           -----------------
    tells that it begins the next burst          its steps
    the burst                                    its steps
    ... until a rank that goes on has stopped    a roll call says who has left
    tells that it has stopped                    tells that it has stopped
    begins what another has begun                begins what another has begun
    ... until all have stopped at one burst      ... until all have stopped at one burst
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias, cast

from join.collectives import Collective
from join.lockstep import MEETING, LockstepChannel, Note

_SLICE_SECONDS = 0.01
_FOLLOW_SECONDS = 0.001  # how often a rank that follows looks for a note
_LOOKS = 20  # how many of these pass before a rank looks what those who have told have told
_UNKNOWN = -1  # in the place of a leader
LIMIT_SECONDS = 60.0
"""How long a rank waits for the others altogether, unless it has an exception to raise."""

Role: TypeAlias = Literal["shadows", "left", "stopped"]


class _Account(NamedTuple):
    """What a rank tells.

    Attributes:
        begun: how many bursts, and meetings, of the loop it has begun.
        last: the last one, a packed note.
        leader: the rank that led when it began that, or ``_UNKNOWN``.
        role: ``"shadows"``: it has left, and goes on with what the others may come to; ``"left"``: it has left, and
            goes on with nothing of itself; ``"stopped"``: it knows that others have left.
    """

    begun: int
    last: int
    leader: int
    role: Role


class Farewell:
    """One loop's.

    Args:
        collective: the ranks.
        channel: the block's.
        key: prefix of the keys in the store.
    """

    def __init__(self, collective: Collective, channel: LockstepChannel, key: str) -> None:
        self._collective, self._channel = collective, channel
        self._keys = [f"{key}/farewell/{rank}" for rank in range(collective.world_size)]
        self._stopped = f"{key}/farewell/stopped"
        self._led = 0, _UNKNOWN  # the last burst begun here, and the rank that led it

    def has_begun(self) -> bool:
        """Whether a rank has left the loop."""
        return any(map(self._collective.check, self._keys))

    def shadow(self, is_over: Callable[[], bool]) -> bool:
        """Shadow what is left of this step, as it was in the step before.

        Args:
            is_over: whether nobody comes to it any more.

        Returns:
            Whether the next step may be shadowed, too.
        """
        while not (is_over() or self._collective.check(self._stopped)):
            note = self._channel.expected
            if note is None:
                return True
            self.meet()
            self._begin(note, "shadows")
        return False

    def follow(self, is_over: Callable[[], bool], come_to: Callable[[int], bool], seconds: float) -> None:
        """Shadow what others have noted; gives up when they have noted nothing more for some time.

        Args:
            is_over: whether nothing more comes of this window.
            come_to: called with the number of the step that the others are in; whether to follow them there.
            seconds: how long to wait for a note.
        """
        self.tell("shadows")
        since, looks = time.monotonic(), 0
        while time.monotonic() - since < seconds:
            packed = self._channel.next_note()
            note, step = (None, 0) if packed is None else self._channel.unpacked(packed)
            if note is not None and come_to(step):
                self._begin(note, "shadows")
                since = time.monotonic()
            elif is_over() or (looks % _LOOKS == 0 and self._accounts(all_of_them=True)):  # so nobody goes on
                return
            else:
                looks += 1
                time.sleep(_FOLLOW_SECONDS)

    def make_up(self) -> None:
        """Shadow what this rank has missed: the others are in a step that it has ended."""
        for note in self._channel.missed:
            self._begin(note, "shadows")

    def meet(self) -> None:
        """The others are to come to the meeting of the next step or burst, if there are any."""
        if self._channel.meets:
            self._begin(Note(MEETING), "shadows")

    def part(self, role: Role, seconds: float = LIMIT_SECONDS) -> None:
        """Come to an end with the others; gives up after some time, if a rank is in none of these bursts."""
        self._channel.look_no_more()
        if role == "stopped":
            self.stop()
        else:
            self.tell(role)
        deadline, looks = time.monotonic() + seconds, 0
        while time.monotonic() < deadline:
            accounts, looks = self._accounts(all_of_them=looks % _LOOKS > 0), looks + 1
            furthest = max(accounts, default=None)
            if furthest is not None and furthest.begun > self._channel.begun:
                seen = self._channel.next_note()
                note, _ = self._channel.unpacked(furthest.last if seen is None else seen)
                self._begin(note, role, furthest.leader if seen is None else _UNKNOWN)
            elif len(accounts) == len(self._keys) and all(
                each.role != "shadows" and each.begun == self._channel.begun for each in accounts
            ):
                return
            else:
                time.sleep(_SLICE_SECONDS)

    def stop(self) -> None:
        """This rank makes no further step: those who have left need not wait for one."""
        self.tell("stopped")
        self._collective.set(self._stopped, "")

    def tell(self, role: Role) -> None:
        """Tell how far this rank is."""
        begun, leader = self._led
        known = leader if begun == self._channel.begun else _UNKNOWN
        self._tell(_Account(self._channel.begun, self._channel.last, known, role))

    def _begin(self, note: Note, role: Role, leader: int = _UNKNOWN) -> None:
        """Begin a burst, with the ``leader`` of another that has begun it, in what may be another step by its count."""
        channel = self._channel
        if note.burst != MEETING:
            channel.end_step()
            if leader != _UNKNOWN:
                channel.leader = leader
        self._led = channel.begun + 1, channel.leader
        self._tell(_Account(channel.begun + 1, note.packed(channel.steps), channel.leader, role))
        channel.shadow(note)

    def _tell(self, account: _Account) -> None:
        self._collective.set(self._keys[self._collective.rank], " ".join(map(str, account)))

    def _accounts(self, *, all_of_them: bool) -> list[_Account]:
        """What ranks have told: none as long as one has not, if all are wanted, which is one request and not many."""
        keys = self._keys if all_of_them else [key for key in self._keys if self._collective.check(key)]
        texts = [text.split() for text in self._collective.texts(keys) or ()]
        return [_Account(*map(int, numbers), role=cast("Role", role)) for *numbers, role in texts]

"""Records what this rank does in a block: :class:`Recorder`, behind ``Join.trace``.

Nothing in the protocol asks whether it is recorded. While it is, the recorder's own functions stand in the place of
some methods of the block's channel, each of which calls the method and notes when that was.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from join.collectives import Work
from join.errors import JoinError, described
from join.files import whole_file
from join.joinable import Burst, BurstState, Joinable
from join.protocol.channel import Channel
from join.protocol.lockstep import Lockstep
from join.protocol.members import Member
from join.protocol.mode import Outcome
from join.recording import COLUMNS, FORMAT, MOST_EVENTS, VERSION, part_of
from join.recording.states import leave_alone, watch

_logger = logging.getLogger("join")

Kind: TypeAlias = Literal[
    "announced", "dummy", "ran", "shadowed", "unfinished", "sent", "waited", "step", "drained"
]  # fmt: skip


class Event(NamedTuple):
    """One thing that happened; times are of the monotonic clock, until it is written."""

    kind: Kind
    begin: float
    end: float
    what: int | str | None
    number: int | None


class Recorder:
    """Records one block on this rank, from where it is made to :meth:`end`.

    Args:
        channel: the block's.
        path: as given to ``Join.trace``.
        entered: when the block was entered, on the monotonic clock.

    Raises:
        JoinError: if the group is recorded already, or in the middle of a loop over ``Join.iterate``.
    """

    def __init__(self, channel: Channel, path: Path, entered: float) -> None:
        if "announce" in vars(channel):
            raise JoinError("what happens on this process group is being recorded already; call join.trace once [J285]")
        if isinstance(channel.mode, Lockstep):
            raise JoinError("join.trace was called in a loop over join.iterate; call it before the loop [J286]")
        self._channel, self._guard, self._headers = channel, channel.guard, channel.headers
        self._path, self._entered, self._began = part_of(path, channel.collective.rank), entered, time.monotonic()
        self._path.unlink(missing_ok=True)  # if this process is killed, there is no file, and not that of another run
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._count = 0
        self._members: dict[int, tuple[int, Member]] = {}  # with their positions, by the id of the joinable
        self._running: dict[int, tuple[float, int | None]] = {}  # since when, and the number of the burst; by position
        self._is_shadowing = False
        self._step: tuple[float, str] | None = None  # when the step of a loop began, and of what it is
        self._sent: object = None  # the header or roll call that was sent last
        self._error: str | None = None
        self._stood_in: list[tuple[object, str]] = []  # the objects that have a method replaced, and its name
        self._meet_members()
        self._stand_in(channel, "announce", self._announce)
        self._stand_in(channel, "follow", self._follow)
        self._stand_in(channel, "shadow_member", self._shadow)
        self._stand_in(channel, "enter_loop", self._enter_loop)
        self._stand_in(channel, "drain", self._drain)
        self._stand_in(self._headers, "send", self._send)
        self._stand_in(self._guard, "wait", self._wait)
        self._stand_in(self._guard, "explain", self._explain)

    def _stand_in(self, owner: object, name: str, function: Callable[..., Any]) -> None:
        """Have ``owner`` call ``function``, which gets the method as its first argument."""
        setattr(owner, name, partial(function, getattr(owner, name)))
        self._stood_in.append((owner, name))

    def _add(self, kind: Kind, begin: float, end: float, what: int | str | None, number: int | None) -> None:
        self._count += 1
        self._events.append(Event(kind, begin, end, what, number))

    # -- joinables ----------------------------------------------------------------------------------------------------

    def _meet_members(self) -> None:
        """Number what is listed, also in blocks that have opened meanwhile: in one order on all ranks."""
        for member in self._channel.roster.listed:
            if id(member.joinable) not in self._members:
                self._members[id(member.joinable)] = len(self._members), member
                if isinstance(member.joinable, Burst):
                    watch(member.joinable, self._watcher(len(self._members) - 1, member))

    def _of(self, joinable: Joinable) -> tuple[int, Member]:
        if id(joinable) not in self._members:
            self._meet_members()
        return self._members[id(joinable)]

    def _watcher(self, position: int, member: Member) -> Callable[[BurstState, BurstState], None]:
        def changed(before: BurstState, after: BurstState) -> None:
            if self._is_shadowing:
                return
            now = time.monotonic()
            if after is BurstState.RUNNING:
                self._running[position] = now, _number(member)
            elif after is BurstState.IDLE:
                begin, number = self._running.pop(position, (now, _number(member)))
                self._add("ran", begin, now, position, number)

        return changed

    # -- what stands in for methods -----------------------------------------------------------------------------------

    def _announce(self, announce: Callable[..., Work], joinable: Joinable, **how: Any) -> Work:
        now, (position, member) = time.monotonic(), self._of(joinable)
        announced, shadowed = member.steps, member.shadowed
        try:
            return announce(joinable, **how)
        finally:
            if member.steps > announced:
                self._add("announced", now, now, position, _number(member))
            elif member.shadowed > shadowed:
                self._add("dummy", now, now, position, _number(member))

    def _follow(self, follow: Callable[[Joinable], None], joinable: Joinable) -> None:
        follow(joinable)
        now = time.monotonic()
        self._add("ran", now, now, self._of(joinable)[0], None)

    def _shadow(self, shadow: Callable[[Member], None], member: Member) -> None:
        position, begin, kind = self._of(member.joinable)[0], time.monotonic(), "unfinished"
        self._is_shadowing = True
        try:
            shadow(member)
            kind = "shadowed"
        finally:
            self._is_shadowing = False
            self._add(kind, begin, time.monotonic(), position, _number(member))

    def _drain(self, drain: Callable[[], Outcome]) -> Outcome:
        begin = time.monotonic()
        try:
            return drain()
        finally:
            self._add("drained", begin, time.monotonic(), None, None)

    def _send(self, send: Callable[..., Work], fields: list[int], index: int | None = None, **how: Any) -> Work:
        now = time.monotonic()
        work = self._sent = send(fields, index, **how)
        what = None if index is None else self._of(self._channel.roster.announcing[index].joinable)[0]
        self._add("sent", now, now, what, self._headers.tally.headers)
        return work

    def _wait(self, wait: Callable[[Work, str], None], work: Work, doing: str = "") -> None:
        if work.is_completed():
            wait(work, doing)
            return
        begin = time.monotonic()
        number = self._headers.tally.headers if work is self._sent else None
        try:
            wait(work, doing)
        finally:
            self._add("waited", begin, time.monotonic(), doing, number)

    def _explain(self, explain: Callable[[BaseException], JoinError | None], error: BaseException) -> JoinError | None:
        cause = explain(error)
        self._error = self._error or described(cause or error)
        return cause

    # -- loops over Join.iterate --------------------------------------------------------------------------------------

    def _enter_loop(self, enter: Callable[[Lockstep], None], mode: Lockstep) -> None:
        enter(mode)
        begin_step, end_step, roll_call = mode.begin_step, mode.end_step, mode.roll_calls.roll_call

        def begin(with_data: int) -> None:
            begin_step(with_data)
            self._step = time.monotonic(), "dummy" if mode.step.shadowing else "data"

        def end() -> None:
            end_step()
            if self._step is not None:
                began, what = self._step
                self._step = None
                self._add("step", began, time.monotonic(), what, mode.step.number)

        def hold(largest: int) -> Any:
            held = roll_call(largest)
            call = held.call

            def send(mine: int) -> None:
                now, self._sent = time.monotonic(), held
                call(mine)
                self._add("sent", now, now, None, self._headers.tally.headers + 1)

            vars(held)["call"] = send
            return held

        # They are dropped with the loop, which ends before its block.
        vars(mode).update(begin_step=begin, end_step=end)
        vars(mode.roll_calls)["roll_call"] = hold

    # -- the end ------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Give the methods back, and write the file, when the block is left; if that is impossible, warn."""
        for owner, name in self._stood_in:
            delattr(owner, name)
        for _, member in self._members.values():
            if isinstance(member.joinable, Burst):
                leave_alone(member.joinable)
        now = time.monotonic()
        for position, (begin, number) in self._running.items():
            self._add("unfinished", begin, now, position, number)
        try:
            with whole_file(self._path) as file:
                file.write(json.dumps(self._told(now)).encode())
        except OSError as error:  # training has gone well, or has an error of its own
            _logger.warning("the trace could not be written to %s: %s", self._path, error)

    def _told(self, now: float) -> dict[str, Any]:
        """The contents of the file, as plain data."""
        members, collective = [member for _, member in self._members.values()], self._channel.collective

        def since(at: float) -> float:
            return round(at - self._entered, 7)

        events = sorted(self._events, key=lambda event: (event.begin, event.end))
        return {
            "format": FORMAT,
            "version": VERSION,
            "rank": collective.rank,
            "world_size": collective.world_size,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "entered": time.time() - (time.monotonic() - self._entered),
            "traced_from": since(self._began),
            "ended": since(now),
            "error": self._error,
            "joinables": [member.joinable.join_name for member in members],
            "announced": [member.steps for member in members],
            "shadowed": [member.shadowed for member in members],
            "left_out": self._count - len(self._events),
            "columns": COLUMNS,
            "events": [[kind, since(begin), since(end), what, number] for kind, begin, end, what, number in events],
        }


def _number(member: Member) -> int | None:
    """How many bursts of a joinable there were so far, on all ranks; this rank has announced or shadowed each.

    ``None`` for one whose bursts another one's announcement covers.
    """
    return member.steps + member.shadowed or None

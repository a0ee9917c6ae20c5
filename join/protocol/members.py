"""Who takes part in a block, and who announces: :class:`Member`, :class:`Scope` and :class:`Roster`.

Bursts announce. So does a plain joinable that has no announcing one before it in the list. Every other plain joinable
follows the nearest announcing one before it: it acts once after each of its bursts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from join.joinable import Burst, Joinable, JoinHook
from join.protocol.header import Header, HeaderCode
from join.report.step_times import StepTimes


@dataclass(eq=False)
class Member:
    """A joinable in a block.

    Attributes:
        joinable: the object.
        hook: its hook for this block.
        followers: the members that act after each of its bursts, if it announces; they have none themselves.
        shadowed: how many it shadowed.
        times: how long those took that this rank announced, each from the one before.
        burst: the joinable, if it announces by nature and not only because it comes first.
        interjects: whether its bursts come between another one and its followers.
        header: the last one that announced it.
    """

    joinable: Joinable
    hook: JoinHook
    followers: list[Member] = field(default_factory=list["Member"])
    shadowed: int = 0
    times: StepTimes = field(default_factory=StepTimes)
    burst: Burst | None = field(init=False)
    interjects: bool = field(init=False)
    header: Header = field(init=False)

    def __post_init__(self) -> None:
        self.burst = self.joinable if isinstance(self.joinable, Burst) else None
        self.interjects = self.burst is not None and self.burst.interjects

    @property
    def steps(self) -> int:
        """How many bursts this rank announced."""
        return self.times.total


@dataclass(eq=False)
class Scope:
    """One block's members and settings.

    Attributes:
        members: all joinables of the block, in the order of the list.
        throw: ``throw_on_early_termination`` of the block.
        timeout: seconds a header may take, or ``None``.
        announcing: the members that announce; filled from ``members``.
    """

    members: Sequence[Member]
    throw: bool
    timeout: float | None
    announcing: list[Member] = field(default_factory=list[Member], init=False)

    def __post_init__(self) -> None:
        for member in self.members:
            if not member.joinable.communicates:
                continue
            if member.burst is not None or not self.announcing:
                self.announcing.append(member)
            else:
                self.announcing[-1].followers.append(member)


class Roster:
    """Who announces on a group. It does not change: another one takes its place when a block opens or closes.

    Args:
        scopes: the blocks that are open, the innermost last.
        world_size: the number of ranks.

    Attributes:
        scopes: these blocks.
        listed: all that are listed in them, also what does not announce.
        announcing: all that announce in them, in the order in which headers count them.
        index: of each member, by the ``id`` of its joinable.
        bursts: those that announce by nature, with their index.
        may_be_pending: those that may be announced before they run.
        code: packs the headers.
        ahead: the one that need not wait for its header (``Burst.runs_ahead``), if there is just one of that kind.
        early: that one, if it may be announced in the forward, before its backward runs: not under ``timeout``, where a
            header means that the burst starts now.
        tracks_leader: whether any burst needs to know the lowest active rank.
        throws: whether all ranks raise as soon as one has run out, as the innermost block says.
        timeout: seconds after which a rank that does not come is an error, if any, as the innermost block says.
        awaits_all: whether every header is awaited, so that no burst runs ahead of its own.
    """

    def __init__(self, scopes: Sequence[Scope], world_size: int) -> None:
        self.scopes = scopes
        self.listed = [member for scope in scopes for member in scope.members]
        self.announcing = [member for scope in scopes for member in scope.announcing]
        self.index = {id(member.joinable): index for index, member in enumerate(self.announcing)}
        bursts = [member.burst for member in self.announcing]
        self.bursts = [(index, burst) for index, burst in enumerate(bursts) if burst is not None]
        self.may_be_pending = [burst for _, burst in self.bursts if type(burst).fulfil is not Burst.fulfil]
        flag_counts = [0 if burst is None else burst.flag_count for burst in bursts]
        self.code = HeaderCode(flag_counts, world_size)
        self.throws, self.timeout = (scopes[-1].throw, scopes[-1].timeout) if scopes else (False, None)
        self.awaits_all = self.throws or self.timeout is not None
        self.tracks_leader = any(burst.tracks_leader for _, burst in self.bursts)
        running_ahead = [self.announcing[index] for index, burst in self.bursts if burst.runs_ahead]
        self.ahead = running_ahead[0] if len(running_ahead) == 1 else None
        self.early = self.ahead.burst if self.ahead is not None and self.timeout is None else None

"""Who takes part in a block, and who announces: :class:`Member` and :class:`Scope`.

Bursts announce. So does a plain joinable that has no announcing one before it in the list. Every other plain joinable
follows the nearest announcing one before it: it acts once after each of its bursts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from join.joinable import Burst, Joinable, JoinHook
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
    """

    joinable: Joinable
    hook: JoinHook
    followers: list[Member] = field(default_factory=list["Member"])
    shadowed: int = 0
    times: StepTimes = field(default_factory=StepTimes)
    burst: Burst | None = field(init=False)
    interjects: bool = field(init=False)

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

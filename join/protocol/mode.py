"""How ranks learn of each other's bursts: :class:`Mode`, of which a group has one at a time.

- ``join.protocol.announced``: each burst is announced by a header, which joined ranks answer.
- ``join.protocol.lockstep``: every rank runs each burst itself, on dummies where it has no data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from join.batch import Step
from join.collectives import Work
from join.collectives.board import Progress
from join.joinable import Burst

if TYPE_CHECKING:
    from join.protocol.channel import Channel


@dataclass(frozen=True)
class Outcome:
    """How a block ended.

    Attributes:
        even: whether all ranks ran out of inputs together.
        last: whether this rank was among the last.
        shadowed: whether ranks have shadowed bursts of others, so that their state is stale.
    """

    even: bool
    last: bool
    shadowed: bool


class Mode(ABC):
    """What depends on how ranks learn of each other's bursts; the rest is the channel's.

    Args:
        channel: the group's.
    """

    all_ranks_run_bursts = False
    """Whether each rank runs every burst itself, on dummies where it has no data: nobody shadows or announces."""
    is_in_loop_body = False
    """Whether this rank is in the body of a loop over ``Join.iterate``, and has not broken out of it."""
    leave_broken_loop: Callable[[], None] | None = None
    """Leaves with all others the loop that this rank has broken out of, before anything is announced; else ``None``."""

    def __init__(self, channel: Channel) -> None:
        self.step = Step()
        """The step of a loop that is under way."""
        self._channel, self._headers, self._guard = channel, channel.headers, channel.guard
        self._rank, self._world_size = channel.collective.rank, channel.collective.world_size

    @abstractmethod
    def announce(self, index: int, *, confirm: bool) -> Work:
        """Tell all ranks that this rank is about to run a burst of member ``index``; as of :meth:`Channel.announce`."""

    def announces_in_forward(self, burst: Burst, *, saves_header: bool) -> bool:
        """Whether a module's backward is announced when its forward begins.

        Args:
            burst: the backward.
            saves_header: whether one header then does for both.
        """
        return saves_header and self._channel.roster.early is burst

    @abstractmethod
    def elect(self, candidate: bool) -> int:
        """The lowest rank among the candidates; ``candidate`` says whether this rank is one."""

    @abstractmethod
    def drain(self) -> Outcome:
        """Shadow the others until all ranks have run out of inputs, as this one has.

        Raises:
            EarlyTerminationError: if another rank is active under ``throw_on_early_termination``.
            PeerError, ProtocolError, JoinTimeoutError: as for active ranks.
        """

    def look(self) -> None:
        """Raise if this rank, which waits, has left out what others run."""

    def place(self) -> Progress | None:
        """Where this rank is in a loop, for the others to read; called in another thread."""
        return None

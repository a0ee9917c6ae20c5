"""How ranks learn of each other's bursts: :class:`Mode`, of which a group has one at a time.

- ``join.protocol.announced``: each burst is announced by a header, which joined ranks answer.
- ``join.protocol.declared``: every rank knows the others' numbers of steps, so headers are computed.
- ``join.protocol.lockstep``: every rank runs each burst itself, on dummies where it has no data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from join.batch import StepBatch
from join.collectives import Work
from join.collectives.board import Progress
from join.joinable import Burst
from join.protocol.members import Roster

if TYPE_CHECKING:
    from join.protocol.channel import Channel


@dataclass(frozen=True)
class Outcome:
    """How a block ended.

    Attributes:
        even: whether all ranks ran out of inputs together.
        last: whether this rank was among the last.
    """

    even: bool
    last: bool


class Mode(ABC):
    """What depends on how ranks learn of each other's bursts; the rest is the channel's.

    Args:
        channel: the group's.
    """

    foresees_bursts = False
    """Whether ranks without data know what comes by declared numbers of steps, so that no header can tell them."""
    minds_followers = True
    """Whether what follows a burst must come once after each, since joined ranks run it just so."""
    all_ranks_run_bursts = False
    """Whether each rank runs every burst itself, on a dummy where it has no data, so that nobody shadows."""
    votes_on_weights = False
    """Whether ranks have to vote on whether weights are in use, since nothing that is announced says so."""
    contributors: int | None = None
    """The ranks that contribute in this step, as a bit mask, where all ranks know them; ``None`` where headers count
    those that contribute to a burst."""
    is_in_loop_body = False
    """Whether this rank is in the body of a loop over ``Join.iterate``, and has not broken out of it."""
    shadowing = False
    """Whether this rank has no data in this step of a loop, and runs it on a dummy."""
    batch = StepBatch.DATA
    """What this rank has in this step."""
    all_have_data = True
    """Whether all ranks have data in this step."""
    first_with_data = 0
    """The lowest rank that has data in this step of a loop."""

    leave_broken_loop: Callable[[], None] | None = None
    """Where this rank has broken out of a loop: leaves it with all others. Comes before anything is announced."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._headers, self._guard = channel, channel.headers, channel.guard
        self._rank, self._world_size = channel.collective.rank, channel.collective.world_size

    @property
    def steps(self) -> int:
        """How many steps of a loop this rank has begun."""
        return 0

    def check(self, roster: Roster) -> None:
        """A block is about to open, after which ``roster`` is that of the group: check that this mode allows it.

        Raises:
            JoinError: if no other block can be open in this mode.
            ValueError: if these members cannot be together in this mode.
        """

    def agree(self) -> None:
        """All ranks have entered a block: exchange what else is to be known then."""

    @abstractmethod
    def announce(self, index: int, *, confirm: bool) -> Work:
        """Tell all ranks that this rank is about to run a burst of member ``index``; as of :meth:`Channel.announce`."""

    def announces_in_forward(self, burst: Burst, *, saves_header: bool, has_buffers: bool) -> bool:
        """Whether a module's backward is announced when its forward begins.

        Args:
            burst: the backward.
            saves_header: whether one header then does for both.
            has_buffers: whether the forward broadcasts buffers.
        """
        return saves_header and self._channel.roster.early is burst

    def someone_may_contribute_unseen(self) -> bool:
        """Whether the last header may not have counted a rank that contributes to its burst."""
        return False

    @abstractmethod
    def elect(self, candidate: bool) -> int:
        """The lowest rank among the candidates; ``candidate`` says whether this rank is one."""

    @abstractmethod
    def drain(self) -> Outcome:
        """This rank has run out of inputs: shadow the others until all have.

        Raises:
            EarlyTerminationError: if another rank is active under ``throw_on_early_termination``.
            PeerError, ProtocolError, JoinTimeoutError: as for active ranks.
        """

    def parting(self) -> Callable[[], bool] | None:
        """How this rank, which fails, tells the others in the next header, if it can; see ``Guard.fail``."""
        return None

    def look(self) -> None:
        """This rank waits: raise if that is because it does not run what others run."""

    def place(self) -> Progress | None:
        """Where this rank is in a loop, for the others to read; called in another thread."""
        return None

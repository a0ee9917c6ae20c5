"""What the trainer itself lists in an epoch's block: :class:`Counters`, :class:`CollectiveCall`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from typing_extensions import override

from join.collectives import Collective
from join.joinable import Block, Burst, BurstState
from join.on_group import OnGroup

T = TypeVar("T")


class Counters:
    """How far a fit is; a rank that ran out of data early takes over the others' counts when the block ends.

    Attributes:
        global_step: optimizer steps, over all fits.
        epochs: completed epochs, over all fits.
    """

    def __init__(self) -> None:
        self.global_step = self.epochs = 0

    def state_dict(self) -> dict[str, int]:
        """Both counts."""
        return {"global_step": self.global_step, "epochs": self.epochs}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take over both counts."""
        self.global_step, self.epochs = state["global_step"], state["epochs"]


class CollectiveCall(OnGroup, Burst, Generic[T]):
    """A call with collectives that all ranks make together, also those that have run out of data.

    Args:
        collective: the ranks.
        function: its argument says whether this rank still has data.
    """

    def __init__(self, collective: Collective, function: Callable[[bool], T]) -> None:
        super().__init__(collective)
        self._function = function
        self._join: Block | None = None  # while a block is open

    def __call__(self) -> T:
        """Call the function, and have joined ranks call it, too."""
        if self._join is not None:
            self._join.channel.announce(self)
        self.state = BurstState.RUNNING
        result = self._function(True)
        self.state = BurstState.IDLE
        return result

    @override
    def attach(self, join: Block) -> None:
        self._join, self.state = join, BurstState.IDLE

    @override
    def detach(self) -> None:
        self._join = None

    @override
    def main_hook(self) -> None:
        self._function(False)

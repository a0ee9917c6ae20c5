"""What the trainer itself lists in an epoch's block: :class:`Counters`, :class:`Ticker`, :class:`CollectiveCall`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from typing_extensions import override

from join import Join
from join.collectives import Collective
from join.on_group import OnGroup
from joinables.trainer._shared_call import SharedCall

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


class Ticker(OnGroup):
    """Calls ``tick`` on a rank that has run out of data, once for each backward of the others that it shadows.

    It has no collective of its own.
    """

    def __init__(self, collective: Collective, tick: Callable[[], None]) -> None:
        super().__init__(collective)
        self._tick = tick

    def __call__(self) -> None:
        """Note that this rank, which has data, has run a backward."""
        if self.join_config.enable:
            Join.notify_join_context(self)

    @override
    def main_hook(self) -> None:
        self._tick()


class CollectiveCall(SharedCall[T]):
    """A call with collectives that all ranks make together, also those that have run out of data.

    The argument of ``function`` says whether this rank still has data.
    """

    def __init__(self, collective: Collective, function: Callable[[bool], T]) -> None:
        super().__init__(partial(function, True), collective)
        self._shadow = partial(function, False)

    @property
    @override
    def join_name(self) -> str:
        return type(self).__name__

    @override
    def main_hook(self) -> None:
        self._shadow()

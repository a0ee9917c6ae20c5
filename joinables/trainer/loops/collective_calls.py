"""What the trainer itself puts into the block of an epoch: :class:`Counters`, :class:`Ticker`, :class:`Meeting`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

import torch
from typing_extensions import override

from join import Burst, Join, Joinable, JoinHook
from join.collectives import Collective
from join.joinable import BurstState

T = TypeVar("T")


class Counters:
    """How far a fit is; a rank that ran out early gets the others' count.

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


class _Shadow(JoinHook):
    """Calls something for each burst that is shadowed."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    @override
    def main_hook(self) -> None:
        self._call()


class _Local(Joinable):
    """A joinable on the ranks of a run."""

    join_keywords: ClassVar[frozenset[str] | None] = frozenset()

    def __init__(self, collective: Collective) -> None:
        super().__init__()
        self._collective = collective

    @property
    @override
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    @override
    def join_process_group(self) -> Collective:
        return self._collective


class Ticker(_Local):
    """Tells a rank that has run out of data of the others' steps; communicates nothing of its own.

    Args:
        collective: the ranks.
        tick: called on a joined rank, for every backward that it shadowed.
    """

    def __init__(self, collective: Collective, tick: Callable[[], None]) -> None:
        super().__init__(collective)
        self._tick = tick

    def __call__(self) -> None:
        """Note that this rank has run a backward, as an active rank."""
        if self.join_config.enable:
            Join.notify_join_context(self)

    @override
    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _Shadow(self._tick)


class Meeting(_Local, Burst, Generic[T]):
    """Lets all ranks run something collective together, also those that have run out of data.

    Args:
        collective: the ranks.
        hold: what they run; is told whether this rank still has data.
    """

    def __init__(self, collective: Collective, hold: Callable[[bool], T]) -> None:
        super().__init__(collective)
        self._hold = hold

    def __call__(self) -> T:
        """Run it, on every rank that has data; outside a block, on all."""
        if self.join_config.enable:
            Join.notify_join_context(self)
        self.state = BurstState.RUNNING
        result = self._hold(True)
        self.state = BurstState.IDLE
        return result

    @override
    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _Shadow(lambda: self._hold(False))

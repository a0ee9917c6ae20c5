"""A function with collectives of its own that the loop calls: :class:`SharedCall`.

Clipping the gradients of a sharded module is one, since their norm is summed over all ranks; so is a metric's
all-reduce::

    clip = SharedCall(lambda: clip_grad_norm_(model.parameters(), 1.0))

    with Join([model, clip, optimizer]):
        for x, y in loader:
            ...
            loss.backward()
            norm = clip()
            optimizer.step()

The order of collectives::

    active rank                     joined rank
    -----------                     -----------
    header                          header
    the function's collectives      the function's collectives
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from typing_extensions import override

from join import Burst, Join, JoinError
from join.joinable import Block, BurstState
from join.on_group import OnGroup

T = TypeVar("T")


class SharedCall(OnGroup, Burst, Generic[T]):
    """A function that all ranks call at the same places, joined ranks too; outside a block, just the function.

    Args:
        function: called without arguments; on a rank without data, on whatever it finds there. The gradients of modules
            that are replayed are the true ones by then.
        process_group: the ranks that call it; ``None`` is the default group.

    Raises:
        TypeError: if it cannot be called.
    """

    def __init__(self, function: Callable[[], T], process_group: Any = None) -> None:
        super().__init__(process_group)
        if not callable(function):
            raise TypeError(f"function is a {type(function).__name__}, which cannot be called; give a function [J161]")
        self._function = function
        self._join: Block | None = None

    def __call__(self) -> T:
        """Call the function, and have joined ranks call it, too.

        Raises:
            JoinError: inside a block that does not list it, where ranks without data would not come.
        """
        if self._join is not None:
            self._join.channel.announce(self)
            self.state = BurstState.RUNNING
            result = self._function()
            self.state = BurstState.IDLE
            return result
        if Join.is_open_on(self._group):
            raise JoinError(f"{self.join_name} communicates inside a Join block that does not list it; list it [J162]")
        return self._function()

    @property
    @override
    def join_name(self) -> str:
        return f"the call of {getattr(self._function, '__qualname__', type(self._function).__name__)}"

    @override
    def attach(self, join: Block) -> None:
        self._join, self.state = join, BurstState.IDLE

    @override
    def detach(self) -> None:
        self._join = None

    @override
    def main_hook(self) -> None:
        self._function()

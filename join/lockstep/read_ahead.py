"""Reading a loader some batches ahead of their use: :class:`ReadAhead`; and how many it has: :func:`length_of`."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from join.arguments import checked_weight
from join.errors import JoinError


def length_of(loader: Iterable[Any]) -> int | None:
    """How many batches a loader has, if it tells."""
    try:
        return len(loader)  # pyright: ignore[reportArgumentType]
    except (TypeError, NotImplementedError):  # a DataLoader raises what its data set or sampler does
        return None


class ReadAhead:
    """The batches of one rank that were read and are not yet used.

    A loader with ``state_dict`` is asked for its state after each batch that is read, since it cannot tell later where
    it was.

    Args:
        loader: what can be iterated.
        weigh: tells what a batch weighs; ``None`` is 1.
    """

    def __init__(self, loader: Iterable[Any], weigh: Callable[[Any], Any] | None) -> None:
        self._loader: Iterable[Any] | None = loader
        self._name = type(loader).__name__
        self._source: Iterator[Any] = iter(loader)
        self.ended = False
        """Whether the loader has no batches beyond those read."""
        self.batches: deque[Any] = deque()
        """The batches that were read and are not yet used, the oldest first."""
        self.weights: deque[float] = deque()
        """What they weigh."""
        self._weigh = weigh
        self.error: BaseException | None = None
        """What the loader raised, or interrupted it; it is not asked again."""
        self.is_used_up = False
        """Whether the loop has come to its end, on all ranks."""
        self._has_state = callable(getattr(loader, "state_dict", None))
        self._states: deque[Any] = deque()  # of the loader, after each of these batches
        self._state_at_end: Any = None
        if self._has_state:
            self._state = self._state_now()  # after the batch that was taken last

    def close(self) -> None:
        """Let go of the loader, whose workers can end; what was read stays."""
        self.ended, self._loader, self._source = True, None, iter(())

    def read(self, wanted: int) -> int:
        """Read up to ``wanted`` more batches; how many there were."""
        for count in range(wanted):
            if self.ended:
                return count
            try:
                batch = next(self._source, self)
                if batch is self:  # there is no other
                    self.ended = True
                    if self._has_state:
                        self._state_at_end = self._state_now()
                    return count
                weight = 1.0 if self._weigh is None else checked_weight(self._weigh(batch), "weigh(batch)")
                if self._has_state:
                    self._states.append(self._state_now())
                self.batches.append(batch)
                self.weights.append(weight)
            except BaseException as error:  # also Ctrl-C: here most of it comes, and the others have to be told
                self.ended, self.error = True, error
                return count
        return wanted

    def take(self) -> Any:
        """The next batch."""
        self.weights.popleft()
        if self._has_state:
            self._state = self._states.popleft()
        return self.batches.popleft()

    def loader_state(self) -> Any:
        """The loader's state as of the batch that was taken last.

        At the end of the loop, if the loader has no more, it is the one that it ends with, in which many begin anew.

        Raises:
            TypeError: if the loader has no ``state_dict``.
            JoinError: if that has raised.
        """
        if not self._has_state:
            raise TypeError(
                f"join.loader_state() needs a loader with state_dict and load_state_dict, and {self._name} has none;"
                " use torchdata's StatefulDataLoader, or count the batches that were handed out [J075]"
            )
        has_ended = self.is_used_up and self._state_at_end is not None and not self.batches
        state = self._state_at_end if has_ended else self._state
        if isinstance(state, _NoState):
            raise JoinError(f"state_dict of {self._name} has raised; see the exception above [J076]") from state.error
        return state

    def _state_now(self) -> object:
        """A copy, since a loader may hand out what it goes on to change."""
        try:
            return copy.deepcopy(cast("Any", self._loader).state_dict())
        except Exception as error:  # it matters only to who asks for the state
            return _NoState(error)


class _NoState:
    """In the place of a state: why there is none."""

    def __init__(self, error: Exception) -> None:
        self.error = error

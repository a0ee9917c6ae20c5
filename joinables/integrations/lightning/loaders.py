"""This rank's loaders: :class:`Loader`, whose length is that of the longest, and :class:`Source`, batches of an epoch.

Lightning counts the steps of an epoch by the length of its loader, refuses a loader without batches where others have
some, and keeps the state of loaders of rank 0 in its checkpoints. So each loader is wrapped where the strategy may do
so, and all ranks tell each other how long theirs are, and, for each checkpoint, where in it they are.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from typing_extensions import override

from join.collectives import collective_of
from join.lockstep.read_ahead import length_of


class Loader:
    """A loader with the length of the longest of all ranks; without one if some rank's has none.

    Args:
        loader: this rank's.
        length: that of the longest.
    """

    def __init__(self, loader: Any, length: int | None) -> None:
        self.loader, self.length = loader, length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError(f"some rank's {type(self.loader).__name__} has no length; give it one on all ranks [J124]")
        return self.length

    def __getattr__(self, name: str) -> Any:  # sampler, dataset, ...
        if name == "loader" or name.startswith("__"):  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    @override
    def __setattr__(self, name: str, value: Any) -> None:  # worker_init_fn, ...
        object.__setattr__(self if name in ("loader", "length", "used") else self.loader, name, value)


class StatefulLoader(Loader):
    """A loader with ``state_dict``: its state is that of all ranks' loaders, as of the batches that were used."""

    used: Any = None
    """The state of this rank's loader after the batch that was used last; ``None`` before it is known."""

    @property
    def state(self) -> Any:
        """A copy of what this rank's loader says now, which it may go on to change; ``None`` if it has no state."""
        return copy.deepcopy(self.loader.state_dict()) if hasattr(self.loader, "state_dict") else None

    def state_dict(self) -> dict[str, Any]:
        """All ranks' states; all ranks call this."""
        mine = self.state if self.used is None else self.used
        return {"ranks": collective_of(None).all_gather_object(mine)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over this rank's state.

        Raises:
            ValueError: if the checkpoint is of another number of ranks, or of a loader that was not wrapped.
        """
        ranks: Sequence[Any] | None = state_dict.get("ranks")
        collective = collective_of(None)
        if ranks is None or len(ranks) != collective.world_size:
            told = "no states of" if ranks is None else f"the states of {len(ranks)} and not of"
            raise ValueError(
                f"the checkpoint has {told} {collective.world_size} ranks' loaders; resume on as many ranks, with"
                " the same strategy, or from the end of an epoch [J125]"
            )
        self.used = ranks[collective.rank]
        if self.used is not None:
            self.loader.load_state_dict(self.used)


def wrapped(loader: Any) -> Loader:
    """Wrap this rank's loader; all ranks do, each its own.

    Args:
        loader: what can be iterated.
    """
    if isinstance(loader, Loader):
        return loader
    has_state = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
    ranks = collective_of(None).all_gather_object((length_of(loader), has_state))
    lengths = [length for length, _ in ranks]
    kind = StatefulLoader if any(has_state for _, has_state in ranks) else Loader
    return kind(loader, None if None in lengths else max(lengths))


class Source:
    """This rank's training batches of one epoch, iterated by one block after the other.

    What a block has read and not handed out is read again by the next.

    Args:
        combined_loader: Lightning's, over wrapped loaders.
    """

    def __init__(self, combined_loader: Any) -> None:
        # One generator for all blocks: a combined loader begins anew whenever it is asked for its iterator.
        self._batches: Iterator[Any] = (batch for batch, *_ in combined_loader)
        self._loaders = [each for each in combined_loader.flattened if isinstance(each, StatefulLoader)]
        self._ahead: deque[tuple[Any, list[Any]]] = deque()  # read and not used: batches, and states after them
        self._at_end: list[Any] | None = None
        self._use(self._states())

    def __iter__(self) -> Iterator[Any]:
        yield from [batch for batch, _ in self._ahead]
        for batch in self._batches:
            self._ahead.append((batch, self._states()))
            yield batch
        if self._at_end is None:
            self._at_end = self._states()

    def limit(self, batches: float) -> None:
        """Read so many batches at most."""
        if batches != float("inf"):
            self._batches = islice(self._batches, int(batches))

    def used(self) -> None:
        """Note that the next batch was handed out."""
        _, states = self._ahead.popleft()
        self._use(states)

    def end(self) -> None:
        """Note that all batches of all ranks were handed out: loaders are in the state in which many begin anew."""
        if self._at_end is not None and not self._ahead:
            self._use(self._at_end)

    def _states(self) -> list[Any]:
        return [loader.state for loader in self._loaders]

    def _use(self, states: Iterable[Any]) -> None:
        for loader, state in zip(self._loaders, states, strict=True):
            loader.used = state

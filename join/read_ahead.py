"""Batches that a loop over ``Join.iterate`` has read and not yet yielded: :class:`ReadAhead`.

Some loaders write each batch into the memory of the batch before, which may still be held. So the versions of the
tensors that are held are compared before and after a read. Other libraries, such as numpy, may write to memory without
a new version. Of a tensor in such memory, some elements are compared.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple, cast

import torch

from join.arguments import checked_number
from join.batch import tensors_in
from join.errors import JoinError, outside

_SAMPLED = 64  # elements of a tensor in memory that other libraries may write to
_tracked, _foreign, _version = attrgetter("tracked"), attrgetter("foreign"), attrgetter("_version")


def check_loader(loader: Any) -> None:
    """Raise a ``TypeError`` if a loader cannot be iterated, or would run code of the loop body too early."""
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TypeError(f"loader={loader!r} cannot be iterated. Pass a DataLoader, a list or a generator. [J068]")
    if getattr(loader, "__name__", "") == "log_every":  # by its name, since every project has its own MetricLogger
        raise TypeError(
            "log_every(...) would log each batch before the loop body runs. Write log_every(join.iterate(loader))."
            " [J524]"
        )


def length_of(loader: Iterable[Any]) -> int | None:
    """Return the number of batches of a loader, or ``None`` if it has no length."""
    try:
        return len(loader)  # pyright: ignore[reportArgumentType]
    except (TypeError, NotImplementedError):  # a DataLoader raises the error of its data set or sampler
        return None


class Read(NamedTuple):
    """A batch that was read and not yet used.

    Attributes:
        batch: The batch.
        weight: Its weight.
        state: The state of a resumable loader after it.
        tensors: The tensors in the batch when it was read.
        tracked: Those of them whose version counts the writes of torch.
        foreign: Those of them whose memory other libraries may write to, such as numpy.
    """

    batch: Any
    weight: float
    state: Any
    tensors: list[torch.Tensor]
    tracked: list[torch.Tensor]
    foreign: list[torch.Tensor]

    @staticmethod
    def of(batch: Any, weight: float, state: Any) -> Read:
        """Return the record of a batch."""
        tensors, tracked, foreign = tensors_in(batch), list[torch.Tensor](), list[torch.Tensor]()
        for tensor in tensors:
            if not tensor.is_inference():
                tracked.append(tensor)
            is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
            if is_plain and not tensor.untyped_storage().resizable() and not tensor.is_shared():
                foreign.append(tensor)
        return Read(batch, weight, state, tensors, tracked, foreign)

    def is_refilled(self, batch: Any) -> bool:
        """Return whether a batch that was just read is, or contains, a container of this one, and this one changed."""
        is_reused = self.batch is batch or any(map(is_, _parts(self.batch), _parts(batch)))
        return is_reused and not all(map(is_, tensors_in(self.batch), self.tensors))


def _parts(batch: Any) -> Iterable[Any]:
    """Return the items of a batch that is a dict, a tuple or a list; nothing for other batches."""
    if isinstance(batch, dict):
        return cast("dict[Any, Any]", batch).values()
    return cast("Iterable[Any]", batch) if isinstance(batch, (tuple, list)) else ()


def _elements(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """Return some elements of each tensor."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors if tensor.numel()]
    return [each[:: -(-len(each) // _SAMPLED)].tolist() for each in flat]


class ReadAhead:
    """Batches of one rank that were read and not yet used.

    A resumable loader is asked for its state after each batch, because it has no record of earlier states.

    Args:
        loader: Any iterable of batches.
        weigh: A function that returns the weight of a batch; with ``None``, every batch weighs 1.
        resumable: Whether to keep the states of the loader.

    Raises:
        TypeError: If the loader has no ``state_dict``, but is to be resumable.
    """

    def __init__(self, loader: Iterable[Any], weigh: Callable[[Any], Any] | None, resumable: bool) -> None:
        self._name, self._resumable = type(loader).__name__, resumable
        if resumable and not callable(getattr(loader, "state_dict", None)):
            raise TypeError(
                "join.iterate(..., resumable=True) needs a loader with state_dict and load_state_dict, but"
                f" {self._name} has no state_dict. Use torchdata's StatefulDataLoader, or count the batches in your"
                f" loop. If the {self._name} wraps a loader that has them, write wrapper.state_dict = loader.state_dict"
                " before the loop. [J075]"
            )
        self.loader: Iterable[Any] = loader
        self.source: Iterator[Any] | None = None
        """Iterator of the loader, from the first read on, since a script may set the epoch before."""
        self.ended = False
        """Whether the loader has no batches beyond those read."""
        self.held: deque[Read] = deque()
        """Batches that were read and not yet used, the oldest first."""
        self._weigh = weigh
        self.error: BaseException | None = None
        """Exception or interrupt of the loader, which is not asked for batches again."""
        self._state_at_end: Any = None
        self.state: Any = None
        """The loader's state after the batch that was taken from ``held`` last."""

    def end(self) -> None:
        """Record that the loop has ended on all ranks, so that the final state of the loader counts."""
        if self._state_at_end is not None and not self.held:
            self.state = self._state_at_end

    def close(self) -> None:
        """Release the loader, so that its workers can end, and keep the batches that were read."""
        self.ended, self.loader, self.source = True, (), iter(())

    def read(self, number: int) -> None:
        """Read batches until this rank holds ``number`` of them, or the loader has no more."""
        while len(self.held) < number and not self.ended:
            try:
                if self.source is None:
                    self.source = iter(self.loader)
                    self.state = self._copy_state() if self._resumable else None
                held = self.held
                versions = list(map(_version, chain.from_iterable(map(_tracked, held))))
                foreign = list(chain.from_iterable(map(_foreign, held)))
                elements = _elements(foreign) if foreign else []
                batch = next(self.source, self)
                state = self._copy_state() if self._resumable else None
                if batch is self:  # the default of next(), so the loader has no more batches
                    self.ended, self._state_at_end = True, state
                    return
                weight = 1.0 if self._weigh is None else checked_number("weigh(batch)", self._weigh(batch))
                is_changed = versions != list(map(_version, chain.from_iterable(map(_tracked, held))))
                is_changed |= bool(foreign) and elements != _elements(foreign)
                for each in held:
                    is_changed |= each.is_refilled(batch)
                if is_changed:
                    raise JoinError(
                        f"The {self._name} has overwritten a batch that join.iterate has read ahead and not yet"
                        " yielded, because it reuses the memory of a batch. Pass join.iterate(..., lookahead=0), or let"
                        " the loader yield copies. [J822]"
                    )
                held.append(Read.of(batch, weight, state))
            except BaseException as error:  # even Ctrl-C, which usually arrives here, so that other ranks get it
                self.ended, self.error = True, error

    def loader_state(self) -> Any:
        """Return the loader's state as of the batch that was taken last.

        Once the loop has ended and all batches were taken, this is the loader's final state. From its final state, a
        loader usually begins its next epoch.

        Raises:
            JoinError: If the loader is not resumable, or if ``state_dict`` raised an exception.
        """
        if not self._resumable:
            place = "a loop that keeps the states of its loader, and calls its state_dict in each step"
            raise outside("join.loader_state was called", place, "Write join.iterate(loader, resumable=True)")
        if isinstance(self.state, Exception):
            raise JoinError(
                f"The state_dict of {self._name} raised an exception. Fix the cause shown above. [J076]"
            ) from self.state
        return self.state

    def _copy_state(self) -> object:
        """Return a copy of the loader's state, since the loader may change the object; or the exception it raised."""
        try:
            return copy.deepcopy(cast("Any", self.loader).state_dict())
        except Exception as error:  # raised only if the user asks for the state
            return error

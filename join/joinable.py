"""Objects that can take part in a :class:`join.Join` block: :class:`Joinable`, its :class:`JoinHook`, :class:`Burst`.

A *burst* is a sequence of collectives that a joinable issues together: the gradient all-reduces of one backward, or the
broadcasts of one step of a sharded optimizer. A joined rank *shadows* a burst: it issues the same collectives and
contributes nothing. ``JoinHook.main_hook`` shadows one burst. ``JoinHook.post_hook`` runs once, when all ranks have
joined.

A plain :class:`Joinable` announces its bursts if it is the first in the list; otherwise each of its bursts follows one
of a joinable before it. A joinable that keeps its own time, such as the backward of a DDP module, derives from
:class:`Burst` and announces each burst itself.

The interface is PyTorch's (PR 61555, ``torch.distributed.algorithms.join``), with two deliberate differences.
``Joinable.__init__`` needs no cooperation from other base classes. The configuration is set on entering the block and
reset on leaving it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from typing_extensions import override

from join.agreement import Values
from join.held import Part
from join.transfer import Exchange


class JoinConfig(NamedTuple):
    """Settings of a joinable for its current block; all ``False`` outside a block.

    Attributes:
        enable: Whether uneven inputs are handled.
        throw_on_early_termination: Whether all ranks raise an error as soon as one rank is out of data.
        is_first_joinable: Whether this joinable is the first in the list.
    """

    enable: bool
    throw_on_early_termination: bool
    is_first_joinable: bool

    @staticmethod
    def construct_disabled_join_config() -> JoinConfig:
        """Return the configuration of a joinable outside any block."""
        return JoinConfig(enable=False, throw_on_early_termination=False, is_first_joinable=False)


class JoinHook:
    """Actions of a joined rank on behalf of one joinable; both methods do nothing unless they are overridden.

    Example::

        class CounterHook(JoinHook):
            def __init__(self, counter):
                self.counter = counter

            def main_hook(self):
                self.counter.reduce(0)  # the collective of an active rank, with nothing to add

            def post_hook(self, is_last_joiner):
                self.counter.is_final = True
    """

    def main_hook(self) -> None:
        """Issue the collectives of one burst, and contribute nothing.

        It is called when another rank has announced the burst, so it must not announce anything itself.
        """

    def post_hook(self, is_last_joiner: bool) -> None:
        """Run once at the end of the block, after all ranks have joined.

        Args:
            is_last_joiner: Whether this rank was among the last that had data.
        """


class Joinable(ABC):
    """Object that communicates in the training loop, and that a rank without data can shadow.

    A subclass calls ``Joinable.__init__(self)`` in its constructor, and ``Join.notify_join_context(self)`` before the
    collectives of each burst. It must define ``join_hook``, ``join_device`` and ``join_process_group``.

    Example::

        class Counter(Joinable):
            def __init__(self):
                super().__init__()
                self.count = torch.zeros(1)

            def add(self, samples):
                Join.notify_join_context(self)
                self.reduce(samples)

            def reduce(self, samples):
                total = torch.tensor([float(samples)])
                dist.all_reduce(total)
                self.count += total

            def join_hook(self, **kwargs):
                return CounterHook(self)

            join_device = torch.device("cpu")
            join_process_group = None

        counter = Counter()
        with Join([counter]):
            for x, y in loader:
                counter.add(len(x))
        print(counter.count)  # the samples of all ranks, on each rank
    """

    communicates: ClassVar[bool] = True
    """Whether this joinable issues collectives in the loop; ``False`` for mere state, which is synchronised on exit."""

    join_keywords: ClassVar[frozenset[str] | None] = None
    """Names of the keywords that ``join_hook`` takes.

    If it is ``None``, they are read from the signature of ``join_hook``; ``**kwargs`` takes all keywords."""

    has_own_group: ClassVar[bool] = True
    """Whether ``join_process_group`` is binding; ``False`` for joinables that use whatever group the block is on."""

    own_steps: int = 0
    """Number of steps that this rank has made in the block by itself, announced or not.

    Ranks that leave together with different numbers are uneven; one of them has made more backwards under ``no_sync``,
    for example. Steps of a loop over ``Join.iterate`` do not count. 0 for joinables without such steps."""

    own_rates: array[float] | None = None
    """Learning rate in each of these steps of an optimizer, which ranks compare at the end of an uneven plain block."""

    needs_scale: bool = False
    """Whether a loop over ``Join.iterate`` must call ``Join.scale``, because nothing else weighs these gradients."""

    mixes_ranks: str = ""
    """Part of this object that combines the samples of all ranks; or ``""``.

    Dummies must then have no samples, and the loop must call ``Join.scale``."""

    join_place: str = ""
    """Suffix of the name, with the position in the list, if another listed object has the same name."""

    _join_config: JoinConfig

    def __init__(self) -> None:
        # Not through nn.Module.__setattr__, which may not be set up yet; and no super().__init__(), so that the other
        # base classes need not cooperate.
        object.__setattr__(self, "_join_config", JoinConfig.construct_disabled_join_config())

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook for one block.

        Args:
            **kwargs: The keywords that the user passed to ``Join``, the same for all joinables.
        """

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """Device on which the joinable communicates."""

    @property
    @abstractmethod
    def join_process_group(self) -> Any:
        """``ProcessGroup`` or :class:`join.collectives.Collective` of the joinable; ``None`` is the default group."""

    def held(self) -> Iterable[Part]:
        """Return values that are equal when a block is left if they were equal when it was entered.

        Reading them should not wait for a device. After an uneven plain block, other ranks take them from the last rank
        with data. After any other block, a difference is one warning.
        """
        return ()

    def before_entering(self, listed: Sequence[Joinable]) -> Mapping[str, Any]:
        """Return values by name that are equal on all ranks when a block is entered, such as learning rates.

        It is called on all ranks before anything is sent. A difference is a ``ProtocolError``. Reading the values
        should not wait for a device.

        Args:
            listed: The joinables of the block, and of the blocks around it on the process group. It is empty if the
                group has one rank.

        Raises:
            ValueError: If this joinable cannot be in one list with the others.
        """
        return {}

    def attach(self, join: Any) -> None:
        """Prepare for a block that is being entered, for example by registering hooks.

        It is called in the order of the list. If it raises an exception, ``detach`` is not called, so undo first
        everything that was done. A joinable that the user lists is attached again for the next block, after
        ``detach``, so reset here what must not remain from the block before.

        Args:
            join: The ``Join`` whose block is entered; a burst announces on its ``channel``.
        """

    def detach(self) -> None:
        """Undo everything that ``attach`` did; called when the block is left, whatever happened in it."""

    def exchange(self, source: int) -> Exchange | None:
        """Return this object's part in the common copy of all objects' state from rank ``source``.

        It is called on all ranks at the end of a block in which some ranks shadowed bursts of others. The last part of
        the generator may issue collectives of this object's own.

        Args:
            source: The rank whose state is copied, one of the last that had data.

        Returns:
            ``None`` if the object has no part in the copy.
        """
        return None

    def own_tensors(self) -> Sequence[torch.Tensor]:
        """Return the tensors that differ between ranks even after the same steps, such as BatchNorm's buffers.

        They are copied from one rank, together with the own tensors of all other objects, at the end of each loop over
        ``Join.iterate``, and of each block in which nothing was shadowed.
        """
        return ()

    def synchronise_own(self, source: int) -> None:
        """Copy the rest of the state that differs between even ranks, with collectives of this object's own.

        It is called on all ranks after ``own_tensors`` were copied.

        Args:
            source: The rank whose state is copied.
        """

    def equal_values(self) -> Mapping[str, Any]:
        """Return values by name that are equal on ranks that have made the same steps, such as numbers and strings.

        Ranks compare them at the end of each loop over ``Join.iterate``, and of each block in which nothing was
        shadowed. A difference is a ``ProtocolError``.
        """
        return {}

    def check_divisor(self, world_size: int) -> None:
        """Raise a ``JoinError`` if this object does not divide the sum of its gradients over ranks by ``world_size``.

        ``Join.scale`` calls it on objects with ``needs_scale``, unless the user passes the divisor.
        """

    @property
    def join_config(self) -> JoinConfig:
        """Settings of this joinable for its current block."""
        return self._join_config

    @property
    def join_name(self) -> str:
        """Name of this joinable in reports and errors."""
        return type(self).__name__ + self.join_place

    @property
    def join_target(self) -> Any:
        """Object that the user listed, which this joinable may only wrap. It can be in one block at a time."""
        return self


class Burst(Joinable):
    """Joinable that announces each of its bursts itself, wherever it is in the list."""

    runs_ahead: ClassVar[bool] = False
    """Whether the burst cannot wait for its header, because other code starts it (autograd)."""

    breaks_in_time: ClassVar[bool] = False
    """Whether its collectives fail under ``timeout`` if a rank does not reach them.

    If not, its header is awaited under ``timeout``, and the missing rank is found while waiting."""

    flag_count: ClassVar[int] = 0
    """Number of flags that this burst adds to every header."""

    interjects: ClassVar[bool] = False
    """Whether the burst runs between another burst and the followers of that one, if it has something to do.

    An example is DDP's bucket rebuild, which runs once."""

    tracks_leader: ClassVar[bool] = False
    """Whether this burst needs to know the lowest active rank."""

    is_pending = False
    """Whether the burst is announced, but none of its collectives has been issued."""

    holds_followers = False
    """On a joined rank, for a burst that interjects: whether the followers must wait until it has run."""

    def flags(self, active: bool) -> Sequence[int]:
        """Return the flags that this rank sets in a header; ``Headers.counts`` has how many ranks set each.

        Args:
            active: Whether this rank announces this burst. Otherwise it announces another one, or has joined.
        """
        return (False,) * self.flag_count

    def check_leavers(self) -> None:
        """Check ranks that left the block between the header before the last one and this burst, which has now run.

        Ranks that ran the burst took them for active. It is called on all ranks, before the next header, if there are
        such ranks.
        """

    def hand_over(self, leader: int) -> None:
        """Copy state that only ranks with data change to ``leader``, the new lowest rank with data.

        It is called on all ranks, at the beginning of the step of a loop over ``Join.iterate`` in which another rank
        than in the step before is the lowest with data, and of the first step of a loop.
        """

    def fulfil(self) -> None:
        """Run the pending burst, contributing nothing and leaving the object as it is; it is not pending afterwards."""


class OnGroup(Joinable, JoinHook):
    """Joinable on a fixed process group, whether it communicates there or not; takes no keywords.

    Args:
        process_group: The process group; ``None`` is the default group.
    """

    join_keywords: ClassVar[frozenset[str] | None] = frozenset()

    def __init__(self, process_group: Any) -> None:
        super().__init__()
        self._group = process_group

    @override
    def join_hook(self, **kwargs: Any) -> JoinHook:
        return self

    @property
    @override
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    @override
    def join_process_group(self) -> Any:
        return self._group


class NothingListed(OnGroup, Burst):
    """Joinable of a block that lists nothing. It has no collectives; the block synchronises loops over iterate only."""


class NothingAlone(NothingListed):
    """The same joinable in a single process without a process group, where the block does nothing."""

    communicates: ClassVar[bool] = False


def values_of(joinables: Sequence[Joinable]) -> Values:
    """Return the values of joinables that should be equal on all ranks after equal steps."""
    return [(joinable.join_name, joinable.equal_values()) for joinable in joinables]

"""What can take part in a :class:`join.Join`: :class:`Joinable`, its :class:`JoinHook`, and :class:`Burst`.

A *burst* is a sequence of collectives that a joinable issues in one go: a backward's gradient all-reduces, the
broadcasts of a sharded optimizer step. A joined rank *shadows* a burst: it issues the same collectives with nothing to
say. ``JoinHook.main_hook`` is the shadow of one burst, ``JoinHook.post_hook`` runs once, when all ranks have joined.

A plain :class:`Joinable` announces its bursts if it comes first in the list, and else follows those before it. One
whose bursts do not come in step with another's derives from :class:`Burst` and announces each of them: a DDP module's
backward does.

The interface is that of PyTorch (PR 61555, ``torch.distributed.algorithms.join``), with two differences on purpose:
``Joinable.__init__`` needs no cooperation from the other base classes, and the configuration is set on entering the
block and reset on leaving it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from typing_extensions import override

from join.transfer import Exchange


class JoinConfig(NamedTuple):
    """How a joinable takes part in the block it is in; all ``False`` outside a block.

    Attributes:
        enable: whether uneven inputs are handled at all.
        throw_on_early_termination: whether the first exhausted rank ends the block for everyone.
        is_first_joinable: whether this joinable is the first of the list.
    """

    enable: bool
    throw_on_early_termination: bool
    is_first_joinable: bool

    @staticmethod
    def construct_disabled_join_config() -> JoinConfig:
        """The configuration of a joinable that is in no block."""
        return JoinConfig(enable=False, throw_on_early_termination=False, is_first_joinable=False)


class JoinHook:
    """The joined rank's side of a joinable; both methods do nothing unless overridden."""

    def main_hook(self) -> None:
        """Issue the collectives of one burst, contributing nothing.

        It is called because another rank has announced the burst, so it must not announce or notify itself.
        """

    def post_hook(self, is_last_joiner: bool) -> None:
        """Run once after all ranks have joined.

        Args:
            is_last_joiner: whether this rank was among the last to run out of inputs.
        """


class Joinable(ABC):
    """An object that communicates in the training loop and can be shadowed by a rank that has run out of inputs.

    A subclass calls ``Joinable.__init__(self)`` in its constructor, and ``Join.notify_join_context(self)`` before the
    collectives of each burst.
    """

    communicates: ClassVar[bool] = True
    """Whether this joinable issues collectives in the loop; ``False`` for mere state, which is synchronised on exit."""

    join_keywords: ClassVar[frozenset[str] | None] = None
    """The keywords ``join_hook`` takes; ``None`` reads them off its signature (``**kwargs`` takes all)."""

    has_own_group: ClassVar[bool] = True
    """Whether ``join_process_group`` matters; ``False`` for what communicates on whatever group the block is on."""

    own_steps: int = 0
    """How many steps this rank has made in the block by itself, announced or not; 0 if there are none such.

    Those in a loop over ``Join.iterate`` do not count. Ranks that leave together with different numbers are uneven: one
    has made more backwards under ``no_sync``."""

    needs_scale: bool = False
    """Whether a loop over ``Join.iterate`` has to call ``Join.scale``: nothing else weighs this one's gradients."""

    _join_config: JoinConfig

    def __init__(self) -> None:
        # Not through nn.Module.__setattr__, which may not be set up yet; and no super().__init__(), so that the other
        # base classes need not cooperate.
        object.__setattr__(self, "_join_config", JoinConfig.construct_disabled_join_config())

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook for one block; ``kwargs`` are those given to ``Join``, the same for all joinables."""

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """The device on which the joinable communicates."""

    @property
    @abstractmethod
    def join_process_group(self) -> Any:
        """The joinable's ``ProcessGroup`` or :class:`join.collectives.Collective`; ``None`` is the default group."""

    def attach(self, join: Any) -> None:
        """Called on entering a block, in the order of the list; the place to register hooks.

        Args:
            join: the ``Join`` whose block is entered; its ``channel`` is where a burst is announced.

        If this raises, ``detach`` is not called: undo what was done before.
        """

    def detach(self) -> None:
        """Called on leaving a block, whatever happened in it; must undo everything that ``attach`` did."""

    def exchange(self, source: int) -> Exchange | None:
        """This object's part in the one copy of the state of all objects from rank ``source``, a last joiner.

        Called on all ranks at the end of a block in which some have shadowed the bursts of others. ``None`` if the
        object has no part in it.
        """
        return None

    def own_tensors(self) -> Sequence[torch.Tensor]:
        """The tensors that each rank has for itself where all ran the same: BatchNorm's buffers.

        They are copied from one rank at the end of each loop over ``Join.iterate``, and of a block in which nothing was
        shadowed, those of all objects together.
        """
        return ()

    def synchronise(self, source: int) -> None:
        """Take over what else there is of the state of rank ``source``, with messages of its own.

        Called on all ranks after ``exchange`` has come to its end.
        """

    def synchronise_own(self, source: int) -> None:
        """Take over what else each rank has for itself from rank ``source``, with messages of its own.

        Called on all ranks after ``own_tensors`` were copied.
        """

    def equal_values(self) -> Mapping[str, Any]:
        """What is the same on all ranks once these have made the same steps, by name: numbers, texts and the like.

        It is compared at the end of each loop over ``Join.iterate``, and of a block in which nothing was shadowed.
        """
        return {}

    @property
    def join_config(self) -> JoinConfig:
        """How this joinable takes part in the block it is in."""
        return self._join_config

    @property
    def join_name(self) -> str:
        """How reports and errors call this joinable."""
        return type(self).__name__

    @property
    def join_target(self) -> Any:
        """The object this joinable stands for; an object can be in one block at a time only."""
        return self


class Burst(Joinable):
    """A joinable that announces each of its bursts itself, wherever it stands in the list."""

    runs_ahead: ClassVar[bool] = False
    """Whether the burst cannot wait for its header's verdict, because foreign code starts it (autograd)."""

    breaks_in_time: ClassVar[bool] = False
    """Whether its collectives break under ``timeout`` if a rank does not come to them. Else its header is awaited then,
    in which a missing rank is looked for."""

    flag_count: ClassVar[int] = 0
    """How many flags this burst adds to every header."""

    interjects: ClassVar[bool] = False
    """Whether the burst comes between another one and its followers, when it has something to do (the bucket rebuild
    of DDP, once)."""

    tracks_leader: ClassVar[bool] = False
    """Whether this burst needs to know the lowest active rank."""

    is_pending = False
    """Whether it is announced, and none of its collectives is issued."""

    holds_followers = False
    """On a joined rank, of a burst that interjects: whether it is to come before the followers may act."""

    @property
    def mixes_ranks(self) -> str:
        """What in this burst computes with the samples of all ranks together, so that dummies must have none; or ""."""
        return ""

    def flags(self, active: bool) -> Sequence[int]:
        """What this rank tells in a header; ``Headers.flags`` has how many ranks set each.

        Args:
            active: whether this rank announces this very burst; else it announces another, or has joined.
        """
        return (False,) * self.flag_count

    def check_leavers(self) -> None:
        """Check ranks that have left the block between the header before the last one and this burst, which is over.

        Called on all ranks, before the next header, if there are such ranks. Those that ran the burst took these for
        active.
        """

    def fulfil(self) -> None:
        """Run the pending burst with nothing to say, leaving the object as it is; it is not pending then."""


class OnGroup(Joinable, JoinHook):
    """Communicates, if at all, on a group that it is given; takes no keywords.

    Args:
        process_group: the ranks; ``None`` is the default group.
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
    """Has no collectives: what its ranks keep in step is their loops over ``Join.iterate``."""

"""The context manager: :class:`Join`.

It checks its arguments, and turns objects into joinables. The order of collectives inside the block is told in
``join.protocol``, that on entering and leaving it in ``join.block``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
from typing_extensions import Self

from join.arguments import (
    check_flags,
    check_initialised,
    check_keywords,
    checked_divisor,
    checked_timeout,
    checked_weight,
    common_collective,
    entered_with,
    expand,
    hook_of,
    listed,
)
from join.batch import Step
from join.block import OpenBlock, block_of, channels, put_inside, put_outside, tell_not_entered
from join.collectives import Collective, Work, collective_of
from join.errors import JoinError
from join.joinable import NothingListed
from join.loop import Batches, Iteration, LoopAlone, Loops, Options
from join.protocol.channel import Channel
from join.protocol.headers import Member, Scope
from join.report import JoinReport
from join.scaling import checked_engine, factor_in_loop, scaled

T = TypeVar("T")
L = TypeVar("L", bound="torch.Tensor | float")


class Join:
    """Lets ranks with different numbers of batches train together.

    Inside the block every rank runs its own loop. A rank that runs out of inputs leaves its loop and, in ``__exit__``,
    shadows the collectives of the others until all are done. After the block all ranks hold the same parameters,
    buffers and optimizer state: those that one process would hold after the same global batches.

    Example::

        with Join([model, optimizer], divide_by_initial_world_size=False):
            for x, y in loader:
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()

    It may be entered again once it was left: a new block, of the same objects, that knows nothing of the one before.

    Args:
        joinables: DDP modules, optimizers, schedulers, scalers, :class:`Joinable` objects of your own, torch's. What is
            trained and not listed is not kept in step. ``[]``: for loops over :meth:`iterate` that train nothing.
        enable: ``False`` makes the block do nothing, for inputs known to be even. In one process, without a process
            group, it does nothing if nothing that is listed communicates: a plain module, say.
        throw_on_early_termination: raise :class:`EarlyTerminationError` on all ranks once one is exhausted.
        timeout: seconds to wait for a rank that does not announce; then :class:`JoinTimeoutError` says who. With it an
            active rank awaits every header right before the burst, and in a loop over :meth:`iterate` all ranks wait
            for each other before each step and each burst. On gloo, a collective of the group breaks inside the block
            once it takes twice as long.
        process_group: the ranks, where nothing is listed, and then to be given; ``None`` is the default group.
        loss_divided_by: by how much each loss is divided before :meth:`scale` gets it, which multiplies it by that: the
            number of micro-batches in a window of accumulation, where a framework divides by it.
        **kwargs: handed to every ``join_hook``. DDP takes ``divide_by_initial_world_size``: ``True`` (as in PyTorch)
            divides gradients by the size of the group, ``False`` by the number of ranks that contributed.

    Raises:
        ValueError: no joinable and no group, none that communicates on many ranks, one given twice, or two process
            groups.
        TypeError: an object that cannot join, a ``Joinable`` whose constructor did not call ``Joinable.__init__``, or a
            keyword that no hook takes.
        ProtocolError: on entering, on all ranks, if they list different objects or give different arguments.

    Source: PyTorch PR 61555 (generic join) for the interface; the protocol is this package's own.
    """

    def __init__(
        self,
        joinables: Iterable[Any],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        timeout: float | None = None,
        process_group: Any = ...,
        loss_divided_by: int = 1,
        **kwargs: Any,
    ) -> None:
        self._timeout = checked_timeout(timeout)
        self._objects, self._group = listed(joinables, process_group), process_group
        self._block: OpenBlock | None = None  # while the block is open
        self._enable = enable
        self._begin_anew()
        check_keywords(self._joinables, kwargs)
        divides = {name: value for name, value in kwargs.items() if name == "divide_by_initial_world_size"}
        check_flags({"enable": enable, "throw_on_early_termination": throw_on_early_termination} | divides)
        self._throw, self._kwargs = throw_on_early_termination, kwargs
        self._divisor = checked_divisor(loss_divided_by)
        self._over_all_ranks = bool(kwargs.get("divide_by_initial_world_size", True))
        self._weight: float | None = None  # outside a block, and at the beginning of one
        self._scope: Scope | None = None  # while the block is open

    def _begin_anew(self) -> None:
        """Make new joinables for the objects, and a new report: the old ones remember the last block."""
        self._joinables = expand(self._objects) if self._objects else [NothingListed(self._group)]
        self._collective = common_collective(self._joinables, self._group, enable=self._enable)
        self._enable = self._enable and any(joinable.communicates for joinable in self._joinables)
        self._loops = Loops()
        self._report: Callable[[], JoinReport] | None = None

    # -- for users ----------------------------------------------------------------------------------------------------

    @property
    def report(self) -> JoinReport:
        """Who did what in the last block, rank by rank; available if that ended without an exception."""
        if self._report is None:
            raise JoinError("there is no report: read it after a block that has ended without an exception [J051]")
        return self._report()

    @staticmethod
    def notify_join_context(joinable: Any) -> Work | None:
        """Tell the other ranks that this rank is about to run a burst of ``joinable``'s collectives.

        Call it before the collectives of each burst.

        Returns:
            The header's sum over all ranks, under way, with ``wait`` and ``is_completed`` as of an all-reduce, if
            ``joinable`` announces: it comes first in the list, or is a :class:`Burst`. ``None`` for the others, which
            follow it, in a block with ``enable=False``, and outside any block, where there is nobody to tell.

        Raises:
            JoinError: inside a block on its group that does not list it, or if the block is over because a rank failed.
            TypeError: if the joinable's constructor did not call ``Joinable.__init__``.
        """
        join: Join | None = block_of(joinable)
        if join is not None:
            return join._block.notify(joinable) if join._block is not None else None  # without one: enable=False
        check_initialised(joinable)
        if Join.is_open_on(joinable.join_process_group):
            name = type(joinable).__name__
            raise JoinError(
                f"{name} called notify_join_context inside a Join block that does not list it; list it [J052]"
            )
        return None

    @staticmethod
    def is_open_on(group: Any) -> bool:
        """Whether a block is open on a process group (``None``: the default one)."""
        return bool(channels) and id(collective_of(group)) in channels

    @property
    def weight(self) -> float | None:
        """What this rank's batch weighs: its number of samples or tokens, say.

        In a loop over :meth:`iterate` it is read: what ``weigh`` has told, 1 without it, and 0 for a dummy, so that
        ``total += loss.item() * join.weight`` is the numerator of a mean; do that only ``if join.weight``, since the
        loss of an empty dummy is mostly NaN.

        In a plain block it is set before each forward, on all ranks or on none, to a number that is not negative, and
        each loss goes through :meth:`scale`. It stays until it is set again or the block ends, after which it is what
        it was before. Gradients become the mean over all ranks, weighted by it, and under accumulation over the
        micro-batches too, so do not divide the loss by their number; ``divide_by_initial_world_size`` has no say then.
        ``None``, the default: every rank weighs the same.

        Raises:
            ValueError: on setting, if it is negative, infinite or NaN.
            TypeError: on setting, if it is no number.
            JoinError: on setting it in a loop over :meth:`iterate`.
        """
        step = self._step
        if step is not None:
            return step.weight
        return self._weight if self._scope is None else self._scope.weight

    @weight.setter
    def weight(self, weight: float | None) -> None:
        if self._step is not None:
            raise JoinError(
                f"join.weight={weight!r} is set in a loop over join.iterate, where all ranks know what a batch weighs"
                " before it is used; give join.iterate(loader, weigh=function), which returns 0 to leave a batch out"
                " [J468]"
            )
        weight = None if weight is None else checked_weight(weight, "join.weight")
        if self._scope is None:
            self._weight = weight
        else:
            self._scope.weight = weight

    def scale(self, loss: L, divided_over: float | None = None) -> L:
        """Scale a loss by what its batch weighs; call ``backward`` on the result.

        In a loop over :meth:`iterate` gradients become the weighted mean over the batches of all ranks and of all steps
        of a window, whatever engine reduces them; on a dummy the loss becomes 0, also where it is NaN. There it is
        needed with ``weigh`` and ``window``, with a listed module that is not in ``DistributedDataParallel``, and where
        a loss combines ranks; call it for each backward, or for none. In a plain block it is needed where
        :attr:`weight` is set, and changes nothing where it is not.

        Args:
            loss: of this rank's batch: a mean over what is weighed. It is not divided by the number of micro-batches in
                a window, unless ``loss_divided_by`` of ``Join`` says so.
            divided_over: by how many the engine divides the sum over ranks: the world size if it is not given, 1 for
                one that sums.

        Raises:
            JoinError: outside a block.
            ValueError: for a ``divided_over`` that is not positive, or in a plain block.
        """
        step, block = self._step, self._block
        if block is None and not self._is_open:
            raise JoinError("join.scale is for the inside of a block: with Join([...]) as join: ... [J469]")
        if step is not None:
            engine = self._collective.world_size if divided_over is None else checked_engine(divided_over)
            factor = factor_in_loop(step, engine * self._divisor)
            return scaled(loss, factor) if block is None else block.channel.scaling.scale(loss, factor)
        if divided_over is not None:
            raise ValueError(
                f"divided_over={divided_over!r} is for loops over join.iterate; leave it out in a plain block, where"
                " DistributedDataParallel divides [J470]"
            )
        weight = None if self._scope is None else self._scope.weight
        if block is None or weight is None:
            return loss
        scaling = block.channel.scaling
        return scaling.scale(loss, weight * self._divisor, scaling.unit)

    @property
    def _step(self) -> Step | None:
        """The step of a loop over :meth:`iterate` that is under way, also of a block around this one, if any."""
        if self._block is None:  # enable=False, or outside
            return self._loops.last.step if isinstance(self._loops.last, LoopAlone) else None
        return self._block.channel.step if self._block.channel.is_in_loop_body else None

    @property
    def ends_window(self) -> bool:
        """Whether the gradients of a window of accumulation are complete after this step: step the optimizer then.

        ``True`` outside loops over :meth:`iterate`.
        """
        step = self._step
        return step is None or step.ends_window

    @property
    def shadowing(self) -> bool:
        """Whether the batch that :meth:`iterate` handed out last is a dummy, which must not count.

        Also where the loop is that of another block, around this one on the same group.
        """
        return self._block is not None and self._block.channel.step.shadowing

    @property
    def is_last_step(self) -> bool:
        """Whether no other step follows in the loop over :meth:`iterate`, on any rank; ``False`` outside one.

        The same on all ranks, so that all can make something of what is left, such as the gradients of a window of
        accumulation that is not full. No collective is sent for it; but it may wait until all have begun this step.
        With ``throw_on_early_termination``, the step before that error is not called the last.
        """
        return self._loops.last is not None and self._loops.last.is_last_step

    @property
    def pending(self) -> list[Any]:
        """The batches that :meth:`iterate` has read ahead and not handed out, in their order."""
        return [] if self._loops.last is None else list(self._loops.last.ahead.batches)

    def loader_state(self) -> Any:
        """The state of the loader of the last loop over :meth:`iterate`, as of the batch that was handed out last.

        What the loader itself says is ahead of that, by what is read ahead. A loader that takes this state over by
        ``load_state_dict``, on every rank its own, goes on with the next batch: with none on a rank that had run out.
        Once the loop has come to its end on all ranks, it is the state that the loader itself ends with; torchdata's
        begins its next epoch then.

        Raises:
            JoinError: if there was no loop over :meth:`iterate` in this block; if the loader's ``state_dict`` raised.
            TypeError: if the loader has no ``state_dict``.
        """
        if self._loops.last is None:
            raise JoinError("no loop was in this block; join.loader_state() is of one over join.iterate [J054]")
        return self._loops.last.ahead.loader_state()

    def iterate(
        self,
        loader: Iterable[T],
        until: Literal["all", "first"] = "all",
        *,
        dummy: Literal["empty", "last"] | Callable[[T], T] = "empty",
        lookahead: int = 1,
        weigh: Callable[[T], float] | None = None,
        window: int | Literal["all"] = 1,
        fill_window: bool = False,
    ) -> Batches[T]:
        """Hand out ``loader``'s batches in lockstep: all ranks run the loop's body equally often.

        So the body may contain any collectives: of the model, of metrics, of clipping. It must do the same on all
        ranks. A rank that has run out of batches gets dummies, which weigh nothing in gradients; ``shadowing`` tells.

        Args:
            loader: this rank's batches: anything that can be iterated, also with no length or no batches.
            until: ``"all"``: until all ranks have run out. ``"first"``: all ranks stop when one has run out; what they
                had read ahead is in ``pending``.
            dummy: ``"empty"``: the rank's last batch with all tensors of length 0 along their first dimension.
                ``"last"``: the last batch itself; not where ranks compute together (SyncBatchNorm), for there it would
                count. A function: what it returns for the last batch, at every step. A rank that never had a batch uses
                the first one of another rank.
            lookahead: how many steps one roll call is for, rounded up to a multiple of ``window``. Up to
                ``2 * lookahead - 1`` batches are read ahead and held, besides the one in use. A loader with a
                ``state_dict`` is asked for it after each; see :meth:`loader_state`.
            weigh: tells what a batch weighs: its number of samples or tokens; 0 leaves it out. Each loss goes through
                :meth:`scale` then.
            window: the steps whose gradients one optimizer step averages, also in a last window that is not full;
                ``"all"``: the whole loop, of which all batches are read first. Each loss goes through :meth:`scale`
                then, and optimizers step where :attr:`ends_window` says so.
            fill_window: fill a last window that is not full with dummies on all ranks, for engines that count
                micro-batches themselves.

        Returns:
            The batches, once. ``len`` of it is how many steps all ranks make; a ``TypeError`` if a loader has none.

        Raises:
            ValueError, TypeError: for arguments that are none of these.
            JoinError: in the loop, on all ranks, if it is inside another one on the same group.
            ProtocolError: on all ranks, if some leave the loop early and others do not.
            PeerError: if a rank fails, in its loader or in the body.
        """
        if not self._is_open:
            raise JoinError("join.iterate is for the inside of a block: with Join([...]) as join: ... [J055]")
        options = Options(until, dummy, lookahead, weigh, window, bool(fill_window))
        if self._block is None:  # enable=False
            return self._loops.begin(LoopAlone(loader, options, self._collective.world_size))
        if self._loops.running is not None:
            self._loops.running.leave(gives_way=True)
        return self._loops.begin(
            Iteration(self._block.channel, loader, options, throw=self._throw, over_all_ranks=self._over_all_ranks)
        )

    @property
    def _is_open(self) -> bool:
        return self._scope is not None

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name != "weight":
            raise AttributeError(f"Join has no attribute {name!r} to set; did you mean weight? [J057]")
        object.__setattr__(self, name, value)

    # -- for joinables ------------------------------------------------------------------------------------------------

    @property
    def channel(self) -> Channel:
        """The protocol of this block's group, for :class:`Burst` implementations."""
        assert self._block is not None
        return self._block.channel

    @property
    def collective(self) -> Collective:
        """The group of this block."""
        return self._collective

    # -- the context manager ------------------------------------------------------------------------------------------

    def open(self) -> Self:
        """Enter the block where no ``with`` statement can be: in the hooks of a framework. Leave it by :meth:`close`.

        Raises:
            JoinError, ProtocolError, ValueError, TypeError: as entering by ``with`` does.
        """
        return self.__enter__()

    def close(self, error: BaseException | None = None) -> None:
        """Leave the block, if it is open, as at the end of a ``with`` statement.

        Args:
            error: what the code in the block has raised, of which the others are told; raise it yourself after this.

        Raises:
            PeerError, ProtocolError, JoinTimeoutError: as leaving by ``with`` does.
        """
        if self._is_open:
            self.__exit__(error and type(error), error, error and error.__traceback__)

    def __enter__(self) -> Self:
        if self._is_open:
            raise JoinError("this Join is open: leave its block before it is entered again, or build another [J058]")
        self._begin_anew()
        for joinable in self._joinables:
            if block_of(joinable.join_target) is not None:
                raise JoinError(f"{joinable.join_name} is inside another Join block already; leave that first [J059]")
        if not self._enable:
            self._scope = Scope([], self._throw, self._timeout, self._weight)
            put_inside(self, self._joinables, enable=False, throw=False)
            self._report = JoinReport
            return self
        try:
            members = [Member(joinable, hook_of(joinable, self._kwargs)) for joinable in self._joinables]
            self._scope = Scope(members, self._throw, self._timeout, self._weight)
            self._block = block = OpenBlock(self._collective, self._scope)
        except BaseException as error:
            self._scope = None
            tell_not_entered(self._collective, error)
            raise
        block.undo.callback(self._unconfigure)
        try:
            arguments = {"throw_on_early_termination": self._throw, "timeout": self._timeout, **self._kwargs}
            block.begin(entered_with(self._joinables, arguments, self._divisor))
            put_inside(self, self._joinables, enable=True, throw=self._throw)
            block.attach(self)
        except BaseException:
            block.undo.close()
            raise
        block.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._enable:
            self._unconfigure()
            return
        assert self._block is not None
        block = self._block
        try:
            self._report = block.end(error, self._loops)
            if error is None and self._loops.last is None and not self._objects:
                warnings.warn(
                    "a block that lists nothing is for loops over join.iterate, and there was none: write for batch in"
                    " join.iterate(loader)",
                    stacklevel=2,
                )
        finally:
            block.undo.close()

    def _unconfigure(self) -> None:
        self._scope = self._block = None
        put_outside(self._joinables)

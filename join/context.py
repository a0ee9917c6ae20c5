"""Context manager around a training loop: :class:`Join`, the class that users write.

``Join`` checks its arguments and turns the listed objects into joinables. Everything that communicates lies below it:
``join.block`` documents the collectives on entering and leaving a block, ``join.protocol.channel`` the collectives
inside a block, and ``join.loop`` the loops over :meth:`Join.iterate`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from typing_extensions import Self

from join.arguments import (
    check_flags,
    check_initialised,
    check_keywords,
    checked_names,
    checked_number,
    checked_timeout,
    collective_to_tell,
    common_collective,
    entered_with,
    expand,
    hook_of,
    is_alone,
    listed,
)
from join.batch import PLAIN, Step
from join.block import BlockAlone, OpenBlock, channels, claim, joins, release, report_failed_entry
from join.collectives import Collective, SingleCollective, Sum, collective_of
from join.errors import JoinError, explain, outside, wrong_value
from join.failure.guard import FORK
from join.joinable import NothingAlone, NothingListed
from join.loop import Batches, Loop
from join.mean import mean_over_ranks
from join.protocol.channel import Channel
from join.protocol.headers import Member, Scope
from join.read_ahead import check_loader
from join.report import JoinReport
from join.rounds import Options
from join.scaling import factor_in_loop, scale_alone, scaled

T = TypeVar("T")
L = TypeVar("L", bound="torch.Tensor | float")

_ITS_BLOCK = "its block", "Write with Join([...]) as join: around it"
_A_LOOP = "the body of a loop over join.iterate, which all ranks run"
_TRAIN_IN_BODY = "Call it there. Between len(loop) and the first step, and in the loader, train nothing"
_LIST_A_MEAN = "Loop over join.iterate(loader), or list a joinables.Mean in the block and read it after the block"


class Join:
    """Context manager for training on ranks that have different numbers of batches.

    Inside the block each rank runs its own training loop. A rank that is out of data leaves its loop and stays in
    ``__exit__``. There it *shadows* the other ranks: it issues the same collectives and contributes nothing to them.
    The block ends on all ranks when the last rank is out of data. All ranks then hold the same parameters, buffers and
    optimizer state: those of a single process that has trained on the same global batches.

    Example::

        with Join([model, optimizer], divide_by_initial_world_size=False) as join:
            for x, y in loader:
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()
        if rank == 0:
            torch.save(model.module.state_dict(), "model.pt")  # all ranks hold the same state
            print(join.report)

    If the loop body contains collectives of its own, such as the all-reduce of a metric, loop over :meth:`iterate`
    instead of the loader.

    A ``Join`` can be entered again after its block has ended. The new block has the same objects, and keeps nothing
    from the previous one.

    Args:
        joinables: The objects to synchronise: DDP modules, optimizers, schedulers, gradient scalers, and
            :class:`Joinable` objects, your own or torch's. An object that is trained but not listed is not
            synchronised. ``None`` is skipped. Pass ``[]`` for loops over :meth:`iterate` that train nothing.
        enable: If ``False``, the block does nothing. Use this for inputs that are known to be even. In a single
            process without a process group, a block whose objects do not communicate, such as a plain module, does
            nothing either.
        throw_on_early_termination: If ``True``, all ranks raise :class:`EarlyTerminationError` as soon as one rank is
            out of data.
        timeout: Seconds to wait for a rank that does not announce its next collectives; ``None``, the default, is
            without limit. After that time :class:`JoinTimeoutError` names the rank. With a timeout, an active rank
            waits for every header right before the burst of collectives that it announces. In a loop over
            :meth:`iterate`, all ranks wait for each other before each step and each burst. On gloo, a collective of
            the process group fails inside the block if it takes more than twice the timeout.
        process_group: The process group of a block that lists nothing, where it is required. ``None`` is the default
            process group. Without one, a single process makes a block of its own, which does nothing.
        loss_divided_by: The number by which each loss is divided before :meth:`scale` gets it. Frameworks divide by
            the number of micro-batches in an accumulation window; pass that number. :meth:`scale` multiplies the loss
            by it.
        own_attributes: Names of attributes that each rank has for itself, such as a timer in a wrapper of an optimizer.
            All other attributes of listed optimizers and wrappers, numbers and texts in modules, and extra state of
            modules are equal on all ranks after an uneven plain block if they were equal before it.
        **kwargs: Keywords for the ``join_hook`` of every listed object. DDP takes ``divide_by_initial_world_size``:
            ``True``, the default as in PyTorch, divides gradients by the size of the process group. ``False`` divides
            them by the number of ranks that contributed, as a single process would.

    Raises:
        ValueError: If the list is empty and no process group is passed, if there are several processes and no listed
            object communicates, if an object is listed twice, if the objects use more than one process group, or if
            an argument is out of range.
        TypeError: If an object cannot join, if the constructor of a ``Joinable`` did not call ``Joinable.__init__``, if
            no hook takes a keyword, or if an argument has the wrong type.
        ProtocolError: On entering the block, on all ranks, if ranks list different objects or pass different arguments.

    Source: PyTorch PR 61555 (generic join) for the interface; the protocol is this package's own.
    """

    # An exception in the constructor is sent to other ranks, so these have values before it.
    _enable, _group, _objects = True, None, ()
    _block: OpenBlock | BlockAlone | None = None  # while it is open
    _weight: float | None = None  # outside a block, and at the beginning of each block

    def __init__(
        self,
        joinables: Iterable[Any],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        timeout: float | None = None,
        process_group: Any = ...,
        loss_divided_by: int = 1,
        own_attributes: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        try:
            self._enable, self._group = enable, process_group
            self._timeout = checked_timeout(timeout)
            self._objects = listed(joinables, process_group)
            self._reset()
            check_keywords(self._joinables, kwargs, Join.__init__.__annotations__.keys() - {"kwargs", "return"})
            divides = {name: value for name, value in kwargs.items() if name == "divide_by_initial_world_size"}
            check_flags({"enable": enable, "throw_on_early_termination": throw_on_early_termination} | divides)
            self._throw, self._kwargs = throw_on_early_termination, kwargs
            micro_batches = "the number of micro-batches in an accumulation window"
            self._divisor = int(
                checked_number("loss_divided_by", loss_divided_by, micro_batches, least=1, is_whole=True)
            )
            self._own_attributes = checked_names(own_attributes)
        except BaseException as error:
            self._give_up(error)
            raise

    def _reset(self) -> None:
        """Make new joinables for the objects, and forget the report: both belong to the previous block."""
        nothing = NothingAlone if is_alone(self._group) else NothingListed
        self._joinables = expand(self._objects) or [nothing(self._group)]
        self._collective = common_collective(self._joinables, self._group, enable=self._enable)
        self._loop: Loop[Any] | None = None  # that began last
        self._report: JoinReport | None = None

    # -- for users ----------------------------------------------------------------------------------------------------

    @property
    def report(self) -> JoinReport:
        """Report of the last block: the steps of each rank, and how long it waited.

        Example::

            with Join([model, optimizer], divide_by_initial_world_size=False) as join:
                train()
            print(join.report)

        Raises:
            JoinError: If no block has ended yet, or if the last one ended with an exception.
        """
        if self._report is None:
            raise JoinError("There is no report yet. Read it after a block that ended without an exception. [J051]")
        return self._report

    @staticmethod
    def notify_join_context(joinable: Any) -> Sum[int] | None:
        """Announce to the other ranks that this rank is about to run a burst of ``joinable``'s collectives.

        Call it in your own :class:`Joinable`, before the collectives of each burst.

        Example::

            class GlobalSum(Joinable):
                def add(self, value):
                    Join.notify_join_context(self)
                    dist.all_reduce(value)

        Args:
            joinable: The object that is about to communicate.

        Returns:
            The sum of the header over all ranks, if ``joinable`` announces its bursts: if it is the first in the list,
            or a :class:`Burst`. The sum is still being computed, and has ``wait`` and ``is_completed`` as the work of
            an all-reduce has. Its ``get_future`` waits. ``None`` for all other joinables, which follow the first one,
            for a block with ``enable=False``, and outside any block.

        Raises:
            JoinError: If a block is open on the joinable's process group and does not list it, or if the block has
                ended because a rank failed.
            TypeError: If the constructor of the joinable did not call ``Joinable.__init__``.
        """
        join: Join | None = joins.get(id(joinable))
        if join is not None:
            return join._block.notify(joinable) if join._block is not None else None
        check_initialised(joinable)
        if Join.is_open_on(joinable.join_process_group):
            raise JoinError(
                f"{type(joinable).__name__} called notify_join_context inside a Join block that does not list it. Add"
                " the object to the list of joinables. [J052]"
            )
        return None

    @staticmethod
    def is_open_on(group: Any) -> bool:
        """Return whether a block is open on a process group.

        Example::

            if not Join.is_open_on(None):
                dist.barrier()  # no rank is inside a block on the default group

        Args:
            group: The process group; ``None`` is the default group.
        """
        return bool(channels) and id(collective_of(group)) in channels

    @staticmethod
    def current(process_group: Any = None) -> Join:
        """Return the ``Join`` whose block is open on a process group; the innermost one of several.

        Example::

            def train_one_epoch(model, loader, optimizer):  # called in a block
                for x, y in Join.current().iterate(loader):
                    ...

        Args:
            process_group: The process group; ``None`` is the default group.

        Raises:
            JoinError: If no block is open on it.
        """
        collective = collective_of(process_group) if process_group is not None or dist.is_initialized() else None
        for join in reversed(list(joins.values())):  # which is alone in a block without a process group
            if join.collective is collective or isinstance(join.collective, SingleCollective):
                return join
        fix = "Write with Join([...]): around the call, or pass the process group of the block"
        raise outside("Join.current was called", "a block on this process group", fix)

    @property
    def weight(self) -> float | None:
        """Weight of this rank's batch, such as its number of samples or tokens.

        *In a plain block* you set it before each forward, on all ranks or on none, and pass each loss through
        :meth:`scale`. Gradients become the mean over the batches of all ranks, weighted by it. Under accumulation they
        become the mean over the micro-batches too, so do not divide the loss by their number.
        ``divide_by_initial_world_size`` has no effect then. A weight is valid until you set another one or the block
        ends; after the block the attribute has its value from before the block. ``None``, the default, gives every rank
        the same weight::

            for x, y in loader:
                join.weight = len(x)
                join.scale(loss_fn(model(x), y)).backward()

        *In a loop over* :meth:`iterate` you read it. It is the result of ``weigh``, 1 without ``weigh``, and 0 for a
        dummy batch. Test it before you use a loss, because the loss of an empty dummy batch is usually NaN::

            for x, y in join.iterate(loader, weigh=lambda batch: len(batch[0])):
                loss = train_step(x, y)
                if join.weight:
                    total += loss.item() * join.weight  # numerator of a weighted mean

        Raises:
            ValueError: On setting, if the weight is negative, infinite or NaN.
            TypeError: On setting, if the weight is not a number.
            JoinError: On setting it in a loop over :meth:`iterate`.
        """
        step = self._step
        if step.in_loop:
            return step.weight
        return self._weight if self._block is None else self._block.scope.weight

    @weight.setter
    def weight(self, weight: float | None) -> None:
        if self._is_in_loop:
            raise JoinError(
                f"join.weight={weight!r} was set in a loop over join.iterate, which needs all weights before a step."
                " Pass join.iterate(loader, weigh=function), with 0 for a batch that does not count. [J468]"
            )
        weight = None if weight is None else checked_number("join.weight", weight)
        if self._block is None:
            self._weight = weight
        else:
            self._block.scope.weight = weight

    def scale(self, loss: L, divided_over: float | None = None) -> L:
        """Scale a loss by the weight of its batch.

        Call ``backward`` on the result. Scale the loss of every backward in a loop, or of none.

        In a loop over :meth:`iterate`, gradients become the weighted mean over the batches of all ranks and of all
        steps of an accumulation window, whatever engine reduces them. On a dummy batch the loss becomes 0, even if it
        was NaN. Scaling is required with ``weigh``, with ``window``, for a listed module that is not wrapped in
        ``DistributedDataParallel``, and for a loss that combines the outputs of several ranks.

        In a plain block, scaling is required if :attr:`weight` is set. If it is not set, the loss is returned as it is.

        Example::

            for tokens in join.iterate(loader, weigh=len):
                join.scale(loss_fn(model(tokens))).backward()

        Args:
            loss: The loss of this rank's batch, as a mean over the samples or tokens that its weight counts. Do not
                divide it by the number of micro-batches in a window, unless you pass ``loss_divided_by`` to ``Join``.
            divided_over: The number by which the engine divides the sum of the gradients over ranks. The default is the
                size of the process group; pass 1 for an engine that only sums. Only for loops over :meth:`iterate`.

        Returns:
            The scaled loss, with the same shape as ``loss``.

        Raises:
            JoinError: If the block is not open. If ``divided_over`` is not passed, and a listed FSDP module does not
                divide by the size of the process group.
            ValueError: If ``divided_over`` is not positive, or is passed in a plain block.
        """
        step, block = self._step, self._block
        if block is None:
            raise outside("join.scale was called", *_ITS_BLOCK)
        if not block.is_alone and block.channel.guard.closed is FORK:
            block.channel.guard.raise_closed()
        if step.in_loop:
            if divided_over is None:
                divided_over = self._collective.world_size
                for joinable in self._joinables:
                    if joinable.needs_scale:
                        joinable.check_divisor(divided_over)
            else:
                divisor = "the number by which the engine divides the sum over ranks: the world size, or 1 if it sums"
                divided_over = checked_number("divided_over", divided_over, divisor, is_positive=True)
            factor = factor_in_loop(step, divided_over * self._divisor)
            return scaled(loss, factor) if block.is_alone else block.channel.scaling.scale(loss, factor)
        if self._is_in_loop:  # which reads its batches, and no batch has a weight yet
            raise outside("join.scale was called", _A_LOOP, _TRAIN_IN_BODY)
        if divided_over is not None:
            kind = "possible in a plain block, where DistributedDataParallel divides the gradients"
            raise wrong_value("divided_over", divided_over, kind, "it in loops over join.iterate only")
        weight = block.scope.weight
        if weight is None:
            return loss
        if block.is_alone:
            targets = [joinable.join_target for joinable in self._joinables]
            return scale_alone(scaled(loss, self._divisor), weight, targets)
        scaling = block.channel.scaling
        return scaling.scale(loss, weight * self._divisor, scaling.unit, weight)

    def mean(self, value: Any, weight: float | torch.Tensor | None = None) -> Any:
        """Return the mean of a value over the ranks with data, in a loop over :meth:`iterate`: the same on all ranks.

        Call it on all ranks, on dummy batches too, which do not count. It is one small all-reduce. Tensors are reduced
        on their device, and the host does not wait for them.

        Example::

            for x, y in join.iterate(loader):
                loss = train_step(x, y)
                losses.append(join.mean(loss.item()))
                logs = join.mean({"loss": loss.detach(), "accuracy": accuracy}, weight=len(x))

        Args:
            value: A number, a tensor, or a dict of these, with the same keys and shapes on all ranks. On a dummy batch,
                and with a weight of 0, it is ignored, even if it is NaN.
            weight: The number of samples or tokens that ``value`` is the mean of. The default is :attr:`weight`: the
                result of ``weigh``, or 1.

        Returns:
            A float for a number, a tensor for a tensor, and a dict for a dict. A number beside tensors on an
            accelerator becomes a tensor there. It is NaN if all weights are 0.

        Raises:
            JoinError: Outside a loop over :meth:`iterate`.
            ProtocolError: On every rank, if ranks pass different keys or shapes. On an accelerator, the result is NaN
                instead, since the host does not wait for it.
            TypeError: If an argument is none of these.
            ValueError: If ``weight`` is negative or not finite. A tensor on an accelerator is not checked.
        """
        step = self._step
        if not step.in_loop:
            raise outside("join.mean was called", _A_LOOP, _LIST_A_MEAN)
        return mean_over_ranks(self._collective, value, step.weight if weight is None or step.is_dummy else weight)

    @property
    def _step(self) -> Step:
        """Step of a loop over :meth:`iterate` whose body runs, of this block or of one around it; or ``PLAIN``."""
        return PLAIN if self._block is None else self._block.channel.place.step_of_body

    @property
    def _is_in_loop(self) -> bool:
        """Whether a loop has begun and not ended, and this rank has not left it: in its body, or while it reads."""
        return self._block is not None and self._block.channel.place.step.in_loop

    @property
    def total_weight(self) -> float:
        """Sum of the weights of all ranks' batches in this step of :meth:`iterate`, known without a collective.

        Without ``weigh`` it is the number of ranks with data. It is the count that belongs to :meth:`mean`.

        Example::

            for x, y in join.iterate(loader, weigh=lambda batch: len(batch[0])):
                loss = train_step(x, y)
                meter.update(join.mean(loss.item()), join.total_weight)  # the same meter on all ranks

        Raises:
            JoinError: Outside a loop over :meth:`iterate`.
        """
        if not self._step.in_loop:
            raise outside("join.total_weight was read", _A_LOOP, _LIST_A_MEAN)
        assert self._block is not None
        return float(self._step.of_all * (self._collective.world_size if self._block.is_alone else 1))

    @property
    def ends_window(self) -> bool:
        """Whether this step completes the gradients of an accumulation window.

        Step the optimizer if it is ``True``. Outside loops over :meth:`iterate` it is always ``True``.

        Example::

            for x, y in join.iterate(loader, weigh=lambda batch: len(batch[0]), window=4):
                join.scale(loss_fn(model(x), y)).backward()
                if join.ends_window:
                    optimizer.step()
                    optimizer.zero_grad()
        """
        return self._step.ends_window

    @property
    def shadowing(self) -> bool:
        """Whether the current batch of :meth:`iterate` is a dummy batch, which must not count.

        This includes the loop of another block, around this one on the same process group.

        Example::

            for x, y in join.iterate(loader):
                output = model(x)
                if not join.shadowing:
                    count += len(x)
        """
        return self._step.is_dummy

    @property
    def is_last_step(self) -> bool:
        """Whether the current step of a loop over :meth:`iterate` is the last one; ``False`` outside a loop.

        All ranks get the same answer, so collectives may depend on it. No collective is sent for the answer, but
        reading it may wait until all ranks have begun this step. With ``throw_on_early_termination``, it stays
        ``False`` in the step before the error.

        Example::

            for step, batch in enumerate(join.iterate(loader), start=1):
                train(batch)
                if step % 1000 == 0 or join.is_last_step:
                    evaluate()
        """
        return self._loop is not None and self._loop.is_last_step

    @property
    def pending(self) -> list[Any]:
        """Batches that :meth:`iterate` has read ahead and not yielded, in their order.

        Example::

            for batch in join.iterate(loader, until="first"):
                train(batch)
            unused = join.pending  # of the ranks that still had data
        """
        return [] if self._loop is None else [read.batch for read in self._loop.ahead.held]

    def loader_state(self) -> Any:
        """Return the state of the loader as of the batch that :meth:`iterate` yielded last.

        The loop keeps it only with ``resumable=True``. The loader's own ``state_dict`` is ahead of this state, because
        :meth:`iterate` reads ahead. Every rank saves and loads the state of its own loader. A loader that loads this
        state continues with the next batch, or with none on a rank that was out of data. Once the loop has ended on all
        ranks, the state is the final state of the loader; torchdata's loader begins its next epoch from it.

        Example::

            for step, (x, y) in enumerate(join.iterate(loader, resumable=True)):
                train(x, y)
                if step % 1000 == 999 or join.is_last_step:
                    torch.save(join.loader_state(), f"loader-{rank}.pt")

            loader.load_state_dict(torch.load(f"loader-{rank}.pt"))  # in the next run

        Raises:
            JoinError: If this block has had no loop over :meth:`iterate`, if the loop is not resumable, or if the
                loader's ``state_dict`` raised an exception.
        """
        if self._loop is None:
            raise outside("join.loader_state was called", _A_LOOP, "Call it in a loop over join.iterate, or after one")
        return self._loop.ahead.loader_state()

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
        resumable: bool = False,
    ) -> Batches[T]:
        """Iterate over ``loader`` in lockstep: all ranks run the loop body the same number of times.

        The loop body may therefore contain any collectives: of the model, of metrics, of gradient clipping. It must do
        the same on all ranks. A rank that is out of data gets *dummy batches*, which contribute nothing to gradients;
        :attr:`shadowing` is ``True`` for them.

        Example::

            for x, y in join.iterate(loader):
                output = model(x)
                loss_fn(output, y).backward()
                correct = (output.argmax(1) == y).sum()
                dist.all_reduce(correct)  # every rank calls it in every step

        Args:
            loader: The batches of this rank: any iterable, even one without a length or without batches.
            until: ``"all"`` ends the loop when all ranks are out of data, ``"first"`` when one rank is. The batches
                that other ranks have read ahead by then are in :attr:`pending`.
            dummy: ``"empty"`` yields this rank's last batch with no samples: all tensors have length 0 along their
                first dimension. ``"last"`` yields the last batch itself; it is refused for layers that combine the
                samples of ranks, such as SyncBatchNorm. A function is called with the last batch in each step, and
                returns the dummy batch. A rank that never had a batch uses the first batch of another rank.
            lookahead: The number of steps that one message announces, rounded up to a multiple of ``window``. Up to
                ``2 * lookahead - 1`` batches are held besides the current one. With 0, no batch is read ahead, for
                loaders that reuse the memory of a batch, or that depend on the loop body. Every step then waits for
                all ranks, and ``window`` and :attr:`is_last_step` are errors.
            weigh: A function that returns the weight of a batch: its number of samples or tokens, or 0 for a batch that
                must not count. Pass each loss through :meth:`scale`.
            window: The number of steps whose gradients one optimizer step averages; a last window may have fewer.
                ``"all"`` is the whole loop, whose batches are all read first. Pass each loss through :meth:`scale`, and
                step optimizers if :attr:`ends_window` is ``True``.
            fill_window: Whether to fill up the last window with dummy batches, on all ranks, for engines that count
                micro-batches themselves.
            resumable: Whether to keep the loader's state for :meth:`loader_state`. The loader's ``state_dict`` is then
                called, and its result copied, after each batch.

        Returns:
            The batches, to be iterated once. Their ``len`` is the number of steps that all ranks make; it raises
            ``TypeError`` if the loader of a rank has no length. Other attributes are attributes of the loader, such
            as ``dataset``.

        Raises:
            ValueError, TypeError: If an argument is none of these, or if a resumable loader has no ``state_dict``.
            JoinError: Outside a block; in the loop, on all ranks, if it runs inside another one on the same group.
            ProtocolError: On all ranks, if some ranks leave the loop early and others do not.
            PeerError: If a rank fails, in its loader or in the loop body.
        """
        options = Options(until, dummy, lookahead, weigh, window, bool(fill_window), resumable=bool(resumable))
        block = self._block
        if block is None:
            raise outside("join.iterate was called", *_ITS_BLOCK)
        check_loader(loader)
        over_all_ranks = bool(self._kwargs.get("divide_by_initial_world_size", True))
        options = replace(options, throw=self._throw, over_all_ranks=over_all_ranks)
        if block.is_alone:
            copies = self._collective.world_size
            options = replace(
                options, until="all", lookahead=min(options.lookahead, 1), fill_window=False, throw=False, copies=copies
            )
        return Batches(Loop(block.channel, loader, options, partial(self._begin, block)), loader)

    def _begin(self, block: OpenBlock | BlockAlone, loop: Loop[Any]) -> None:
        """Make a loop, which begins now, the current one of its block."""
        if self._block is not block:
            raise outside("A loop over join.iterate began", *_ITS_BLOCK)
        if self._loop is not None and self._loop.is_open:
            self._loop.leave()
        self._loop = loop

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name != "weight":
            raise AttributeError(f"Join has no attribute {name!r} that can be set. Did you mean join.weight? [J057]")
        object.__setattr__(self, name, value)

    # -- for joinables ------------------------------------------------------------------------------------------------

    @property
    def channel(self) -> Channel:
        """Protocol of this block's process group, on which a :class:`Burst` announces."""
        assert self._block is not None
        return self._block.channel

    @property
    def collective(self) -> Collective:
        """Collectives of this block's process group."""
        return self._collective

    # -- the context manager ------------------------------------------------------------------------------------------

    def open(self) -> Self:
        """Enter the block without a ``with`` statement, in the hooks of a framework. Leave it by :meth:`close`.

        Example::

            def on_train_start(self):
                self.join = Join([self.model, self.optimizer]).open()

            def on_exception(self, error):
                self.join.close(error)

            def on_train_end(self):
                self.join.close()

        Returns:
            This ``Join``.

        Raises:
            JoinError: If this ``Join`` is open already, or if a listed object is inside another block.
            ProtocolError: On all ranks, if ranks list different objects or pass different arguments.
            ValueError, TypeError: As the constructor does.
        """
        return self.__enter__()

    def close(self, error: BaseException | None = None) -> None:
        """Leave the block as at the end of a ``with`` statement. Do nothing if it is not open.

        See :meth:`open` for an example.

        Args:
            error: The exception that the code in the block raised, if any. The other ranks receive its class and text.
                Raise it yourself after this call.

        Raises:
            PeerError: If another rank failed.
            ProtocolError: If ranks have done different things in the block.
            JoinTimeoutError: If a rank did not arrive within ``timeout``.
        """
        if self._block is not None:
            self.__exit__(error and type(error), error, error and error.__traceback__)

    def __enter__(self) -> Self:
        try:  # on the first line, so that the other ranks learn of an interrupt on any line
            if self._block is None:
                self._enter()
                return self
        except BaseException as error:
            self._give_up(error)
            raise
        raise JoinError("This Join is open already. Leave its block first, or make another Join. [J058]")

    def _enter(self) -> None:
        self._reset()
        for joinable in self._joinables:
            if id(joinable.join_target) in joins:
                raise JoinError(f"{joinable.join_name} is inside another Join block. Leave that block first. [J059]")
        if not (self._enable and any(joinable.communicates for joinable in self._joinables)):
            self._block = BlockAlone(Scope([], self._throw, self._timeout, self._weight))
            claim(self, self._joinables, enable=False, throw=False)
            return
        members = [Member(joinable, hook_of(joinable, self._kwargs)) for joinable in self._joinables]
        scope = Scope(members, self._throw, self._timeout, self._weight, self._own_attributes)
        self._block = OpenBlock(self._collective, scope)
        arguments = {"throw_on_early_termination": self._throw, "timeout": self._timeout, **self._kwargs}
        if self._divisor != 1:
            arguments["loss_divided_by"] = self._divisor
        if self._own_attributes:
            arguments["own_attributes"] = ", ".join(self._own_attributes)
        self._block.enter(self, entered_with(self._joinables, arguments))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:  # on the first line, so that the other ranks learn of an interrupt on any line
            if isinstance(error, GeneratorExit):  # the block is in a generator, which its consumer closes
                error = error.__context__  # that the consumer handles; without one, it closes as by a break
            if error is not None:
                explain(error)
            self._leave(error)
        except BaseException as failure:
            if self._block is not None:
                self._block.tell(failure)
            explain(failure)
            raise
        finally:
            self._close()

    def _leave(self, error: BaseException | None) -> None:
        assert self._block is not None
        self._report = self._block.end(error, self._loop)
        lists_nothing = not self._block.is_alone and isinstance(self._joinables[0], NothingListed)
        if lists_nothing and error is None and self._loop is None:
            warnings.warn(
                "A block that lists nothing is meant for loops over join.iterate, but it had none. Write for batch in"
                " join.iterate(loader).",
                stacklevel=3,
            )

    def _give_up(self, error: BaseException) -> None:
        """Leave the block, as far as it was entered, and send ``error`` to the other ranks, which wait for this one."""
        try:
            if self._block is not None:
                self._block.tell(error)
            elif self._enable and (collective := collective_to_tell(self._objects, self._group)) is not None:
                report_failed_entry(collective, error)
            explain(error)
        finally:
            self._close()

    def _close(self) -> None:
        """Undo what entering the block has done, as far as it got."""
        try:
            if self._block is not None:
                self._block.undo.close()
        finally:
            if self._block is not None:
                release(self, self._joinables)
            self._block = None

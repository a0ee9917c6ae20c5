"""The forward of a replayed module: :class:`ReplayedForward`.

The order of collectives is told in ``joinables.replay``. In a loop over ``Join.iterate`` all ranks run the module
themselves. There, in the first forward of a loop in which some ranks have a dummy::

    rank with data                                   rank with a dummy
    --------------                                   -----------------
    the lowest: its call, without rows (broadcast)   the same
    once for each kind of call: an attempt on it     the same
    its forward                                      its forward; of an empty dummy, if the attempt has raised, on
                                                     other rows (``joinables.dummy_forward``)
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, cast

import torch
from typing_extensions import override

from join.batch import StepBatch
from join.joinable import Block, BurstState
from join.transfer import broadcast_tensors
from joinables._torch import autograd
from joinables.dummy_forward import Arguments, DummyForward, emptied_output, is_empty_call
from joinables.replacement import ModuleHook
from joinables.replay.dry_run import in_mode
from joinables.replay.module import REMEMBERED, Pass, ReplayedBurst, ReplayedModule, agreed_runs
from joinables.sharding import is_dtensor
from joinables.tensors import tensors_with_grad


class ForwardFlags(NamedTuple):
    """What a forward's header tells, and how many ranks said so.

    Attributes:
        grad: whether it builds a graph.
        training: whether the module is in training mode.
        prepares: whether it prepares a reduction.
        is_other: whether the module is called in another way than the ranks have agreed on.
        with_buffers: whether buffers are broadcast before it.
    """

    grad: int = False
    training: int = False
    prepares: int = False
    is_other: int = False
    with_buffers: int = False


class ReplayedForward(ReplayedBurst):
    """A module's forward."""

    what = "forward"
    tracks_leader = True
    flag_count = len(ForwardFlags._fields)

    def __init__(self, module: ReplayedModule) -> None:
        super().__init__(module)
        self.passes: deque[Pass] = deque(maxlen=REMEMBERED)
        """The last forwards with grad, the newest at the end: the same number on all ranks."""
        self._is_other = False  # the module is called in another way than the ranks have agreed on
        self._takes_empty, self._found_in = True, 0  # whether the module can take an empty batch; the loop, by number
        self._stands_in: Arguments | None = None  # on a dummy: what the module was called with, and does not run on

    @override
    def attach(self, join: Block) -> None:
        super().attach(join)
        agreed_runs[self._of.module] = self._of.dry_run
        self._reduction.attach()
        self._dummy_forward, self._stands_in, self._found_in = DummyForward(join.channel), None, 0
        # Else ranks may compute together with what a rank without data runs on.
        is_known = self._reduction.scales or self._of.dry_run.example is not None
        self._may_stand_in = is_known and not self.mixes_ranks
        before = cast("Any", ModuleHook(self._before))
        # Before everybody else's hooks, which may communicate.
        self._handles = [self._of.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)]
        self._handles.append(self._of.module.register_forward_hook(cast("Any", ModuleHook(self._after))))

    @override
    def detach(self) -> None:
        super().detach()
        self._reduction.detach()
        del self._dummy_forward  # which may hold a batch
        self.passes.clear()

    @override
    def synchronise(self, source: int) -> None:
        """Parameters and buffers that are not spread over the ranks come from the last joiner."""
        broadcast_tensors(self._collective, self._reduction.replicated, source)

    @property
    @override
    def mixes_ranks(self) -> str:
        return f"{self.join_name}, which contains SyncBatchNorm" if self._reduction.mixes_ranks else ""

    @override
    def synchronise_own(self, source: int) -> None:
        buffers = [buffer for buffer in self._of.module.buffers() if not is_dtensor(buffer)]
        broadcast_tensors(self._collective, buffers, source)

    @override
    def flags(self, active: bool) -> ForwardFlags:
        return self._flags() if active else ForwardFlags()

    @override
    def declared_flags(self, weighted: bool) -> ForwardFlags:
        if self._channel.all_ranks_run_bursts:
            return self._flags()
        return self._flags()._replace(grad=True, prepares=True, is_other=self._of.dry_run.call is None)

    def _flags(self) -> ForwardFlags:
        """What this rank can say of the forward that it begins."""
        return ForwardFlags(
            grad=torch.is_grad_enabled(),
            training=self._of.module.training,
            prepares=self._reduction.prepares,
            is_other=self._is_other,
            with_buffers=self._reduction.broadcasts_buffers,
        )

    # -- the active side ----------------------------------------------------------------------------------------------

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        of = self._of
        if of.dry_run.is_running or autograd.in_backward():
            return None
        self._channel.module_called()
        self._channel.end_broken_loop()
        self._is_other = not self._channel.all_ranks_run_bursts and of.dry_run.is_other(args, kwargs)
        if self._is_other and self._channel.foresees_bursts and of.dry_run.call is not None:
            raise ValueError(
                f"with steps=, {type(module).__name__} must be called in the same way each time: a rank without data"
                " cannot know of another [J158]"
            )
        if self._channel.foresees_bursts and not (torch.is_grad_enabled() and self._reduction.will_reduce):
            raise ValueError(
                f"with steps=, each forward of {type(module).__name__} must be one that a backward follows, which"
                " reduces gradients: accumulate without steps=, and evaluate outside the block [J159]"
            )
        self._channel.announce(self)
        self.state = BurstState.RUNNING
        self._begin((args, kwargs))
        self._channel.module_runs_on((args, kwargs))
        return self._instead_of(args, kwargs) if self._may_stand_in else None

    def _instead_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """What to run the module on, if this rank has an empty dummy that it cannot take."""
        channel, self._stands_in = self._channel, None
        if channel.step.batch is not StepBatch.DATA:
            self._dummy_forward.called((args, kwargs))
        if channel.step.all_have_data:
            return None
        example = self._of.dry_run.arguments_of_example()
        if example is None and self._found_in != channel.loop:
            self._found_in, self._takes_empty = channel.loop, self._find_out(args, kwargs)
        if (example is None and self._takes_empty) or channel.step.batch is not StepBatch.EMPTY:
            return None
        if not is_empty_call((args, kwargs)):
            return None
        self._stands_in = args, kwargs
        return example or self._dummy_forward.instead_of((args, kwargs))

    def _find_out(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the module can take a call without rows, that of the lowest rank with data; the same on all ranks."""
        source, inner = self._channel.step.first_with_data, self._reduction.inner
        takes = self._of.dry_run.takes_empty(inner, self._collective, source, (args, kwargs))
        if not takes:
            self._reduction.reset()
        return takes

    def _after(self, module: Any, args: Any, output: Any) -> Any:
        if self._of.dry_run.is_running or autograd.in_backward():
            return None
        self.state = BurstState.IDLE
        stands_in, self._stands_in = self._stands_in, None
        return None if stands_in is None else emptied_output(output, stands_in)

    def _begin(self, mine: Arguments | None) -> None:
        """Agree on the call, and broadcast buffers; called right before the module's own collectives."""
        for each in self.passes:
            if each.done or each.graph is not None:  # of a real forward
                each.outputs.clear()  # before new activations come
        self._reduction.suppress_buffer_sync()
        flags = ForwardFlags(*self._channel.flags(self))
        leader = self._channel.leader  # has what all start from, also if it has just run out
        if flags.is_other:
            dry_run = self._of.dry_run
            try:
                dry_run.agree(self._collective, self._channel.lead(), mine)
                dry_run.attempt(self._reduction.inner, self._collective.rank)
            except Exception:
                dry_run.call = None
                self._reduction.reset()
                raise
        if flags.with_buffers:
            self._reduction.sync_buffers(leader)

    # -- the joined side ----------------------------------------------------------------------------------------------

    @override
    def main_hook(self) -> None:
        self._begin(None)
        flags, module = ForwardFlags(*self._channel.flags(self)), self._of.module
        with (
            torch.set_grad_enabled(flags.grad > 0),
            in_mode(module, training=flags.training > 0),
            self._reduction.reducing(flags.prepares > 0, flags.prepares > 0),
        ):
            outputs = self._of.dry_run.run(module, self._collective.rank)
            if flags.grad:
                self._reduction.forwarded()
        if flags.grad:
            self.passes.append(Pass(tensors_with_grad(outputs)))

"""Modules with collectives of their own: :class:`Replay`, and what it stands for.

Some modules communicate in their forward and backward, in places that nobody else knows: ``fully_shard``,
SyncBatchNorm, tensor parallelism. A joined rank then *replays* them: it runs the module itself, on an empty batch, and
backward through it with zero gradients. So it issues the same collectives, by the same code, and says nothing in them::

    active rank                                        joined rank
    -----------                                        -----------
    forward   header                                   header
              the first: the call, an attempt (1)      the call, an attempt
              broadcast of buffers (DDP)               broadcast of buffers
              the module's own                         the module's own, on the empty batch
    backward  header                                   header
              sum of the weights, if any are set       sum of the weights
              which forwards, if several (2)           which forwards
              the module's own                         the module's own, with zero gradients

(1) again when the module is called in another way. (2) Forwards are numbered backwards from the last. A backward goes
through the forward that a gradient enters first, and those before it that are alive and had no backward yet.

Both headers are awaited where they are sent, so ranks that diverge get an error and not a hang. Forwards without grad
are replayed without it, evaluation in evaluation, backwards that reduce nothing without reducing.

*Gradients.* FSDP and DDP divide by the size of the group. The mean over contributors, or the weighted one, is a factor
on the result. A joined rank clears its gradients where the active ones have, and keeps them where they have. What it
had accumulated when it ran out goes into the next reduction, natively.

*State.* Shards stay with their ranks, so a joined rank must step them too: ``joinables.step``. Unsharded parameters and
buffers come from the last joiner.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from join import Burst, Join, Joinable, JoinError, JoinHook
from join.collectives import Work
from join.transfer import broadcast_tensors
from joinables import _torch_reducer as reducer
from joinables.hooks import ModuleHook
from joinables.reductions import Reduction, reduction_of
from joinables.rehearsal import Example, Rehearsal, in_mode
from joinables.sharding import group_of, is_dtensor, is_fsdp1
from joinables.stand_in import StandIn
from joinables.tensors import adopt_gradients, hides_tensors, tensors_with_grad
from joinables.weights import Weights

_REMEMBERED = 62  # forwards that a backward can go through: bits of a word

# Over blocks: what was agreed on all ranks, and what a rank has not yet reduced.
_rehearsals: weakref.WeakKeyDictionary[torch.nn.Module, Rehearsal] = weakref.WeakKeyDictionary()
_unsynced: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()


class Replay:
    """Says that a rank without data runs ``module`` itself, and with what.

    ``Join`` chooses it by itself for ``fully_shard`` modules and those that contain SyncBatchNorm.

    Args:
        module: any module. Of one that is neither DDP nor ``fully_shard`` only the collectives are met; its gradients
            are neither scaled nor weighed.
        example: what to call it with, if it cannot take an empty batch: a tuple of positional arguments, or a function
            that returns ``(args, kwargs)``. Without, a call of an active rank, with tensors of no rows.
        process_group: the ranks that train the module. By default those that its parameters are spread over (DDP: its
            group; a module without any ``DTensor``: the default group).

    Raises:
        TypeError: if ``module`` is no module, or FSDP1; if ``example`` is neither a tuple nor a function.
    """

    def __init__(self, module: torch.nn.Module, example: Example | None = None, process_group: Any = None) -> None:
        if not isinstance(module, torch.nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"module is a {type(module).__name__}, not a torch.nn.Module")
        refuse_fsdp1(module)
        if example is not None and not isinstance(example, tuple) and not callable(example):
            raise TypeError(
                f"example is a {type(example).__name__}; give a tuple of positional arguments, or a function that"
                " returns (args, kwargs)"
            )
        self.module, self.process_group = module, process_group
        self.example: Example | None = cast("Example | None", example)

    def joinables(self) -> list[Joinable]:
        """The module's forward and its backward."""
        module = _Module(self.module, self.example, self.process_group)
        forward = ReplayedForward(module)
        return [forward, ReplayedBackward(module, forward)]


def refuse_fsdp1(module: torch.nn.Module) -> None:
    """Raise a ``TypeError`` for a module that is, or contains, a ``FullyShardedDataParallel``."""
    if any(is_fsdp1(each) for each in module.modules()):
        raise TypeError(
            f"{type(module).__name__} shards its parameters with FullyShardedDataParallel (FSDP1), which Join cannot"
            " replay; use torch.distributed.fsdp.fully_shard (FSDP2)"
        )


class _Module:
    """What a module's forward and backward have in common."""

    def __init__(self, module: torch.nn.Module, example: Example | None, process_group: Any) -> None:
        self.module = module
        self.reduction: Reduction = reduction_of(module)
        parameter = next(module.parameters(), None)
        self.device = torch.device("cpu") if parameter is None else parameter.device
        if process_group is None and isinstance(module, DistributedDataParallel):
            process_group = cast("Any", module).process_group
        if process_group is None:
            process_group = group_of(self.reduction.parameters, type(module).__name__)
        self.process_group = process_group
        self.rehearsal = _rehearsals.get(module, Rehearsal(self.device, example))
        if self.rehearsal.example is not example:
            self.rehearsal = Rehearsal(self.device, example)
        self.replaying = False  # this rank runs the module on nobody's behalf


class _Graph:
    """Lives as long as the autograd graph into which hooks that hold it were registered."""


class _Pass:
    """A forward with grad.

    Args:
        outputs: its outputs that require grad; of a real forward they are held until its backward or the next forward
            begins, for the graph belongs to the user.
        graph: of a real forward: what lives as long as its graph. A replayed one has none.
    """

    def __init__(self, outputs: list[torch.Tensor], graph: _Graph | None = None) -> None:
        self.outputs = outputs
        self.real = graph is not None
        self.graph: weakref.ref[_Graph] | None = None if graph is None else weakref.ref(graph)
        self.done = False
        """Whether a backward has gone through it."""

    @property
    def is_pending(self) -> bool:
        """Whether a backward can still come, on an active rank."""
        return not self.done and self.graph is not None and self.graph() is not None


class _Replayed(StandIn, Burst, JoinHook):
    what: ClassVar[str]

    def __init__(self, module: _Module) -> None:
        super().__init__(module.module)
        self._of = module
        self._reduction = module.reduction
        self._handles: list[Any] = []

    @override
    def join_hook(self, **kwargs: Any) -> JoinHook:
        return self

    @property
    @override
    def join_name(self) -> str:
        return f"the {self.what} of {type(self._of.module).__name__}"

    @property
    @override
    def join_device(self) -> torch.device:
        return self._of.device

    @property
    @override
    def join_process_group(self) -> Any:
        return self._of.process_group

    @override
    def attach(self, join: Join) -> None:
        self._channel, self._collective = join.channel, join.collective

    @override
    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


class ReplayedForward(_Replayed):
    """A module's forward."""

    what = "forward"
    tracks_leader = True
    join_keywords: ClassVar[frozenset[str] | None] = frozenset()
    # [with grad, in training mode, prepares a reduction, in another way than agreed, buffers are broadcast]
    flag_count = 5

    def __init__(self, module: _Module) -> None:
        super().__init__(module)
        self.passes: deque[_Pass] = deque(maxlen=_REMEMBERED)
        """The last forwards with grad, the newest at the end: the same number on all ranks."""
        self._is_other = self._due = False

    @override
    def attach(self, join: Join) -> None:
        super().attach(join)
        _rehearsals[self._of.module] = self._of.rehearsal
        self._reduction.attach()
        before = cast("Any", ModuleHook(self._before))
        # Before everybody else's hooks, which may communicate.
        self._handles = [self._of.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)]

    @override
    def detach(self) -> None:
        super().detach()
        self._reduction.detach()
        self._of.rehearsal.forget()
        for each in self.passes:
            each.outputs.clear()
        self.passes.clear()

    @override
    def synchronise(self, source: int) -> None:
        """Parameters and buffers that are not spread over the ranks come from the last joiner."""
        broadcast_tensors(self._collective, self._reduction.replicated, source)

    @property
    @override
    def mixes_ranks(self) -> str:
        module = self._of.module
        is_synchronised = any(isinstance(part, torch.nn.SyncBatchNorm) for part in module.modules())
        return f"{self.join_name}, which contains SyncBatchNorm" if is_synchronised else ""

    @override
    def loop_ended(self, source: int) -> None:
        """Each rank's buffers are its own, and a dummy's forward has changed them."""
        buffers = [buffer for buffer in self._of.module.buffers() if not is_dtensor(buffer)]
        broadcast_tensors(self._collective, buffers, source)

    @override
    def flags(self, active: bool) -> Sequence[bool]:
        if not active:
            return (False,) * self.flag_count
        grad, module = torch.is_grad_enabled(), self._of.module
        return (grad, module.training, self._reduction.prepares, self._is_other, self._due)

    @override
    def declared_flags(self, weighted: bool) -> Sequence[bool]:
        # In lockstep nobody replays, but a rank that leaves early, which does what it can.
        is_new = self._of.rehearsal.call is None and not self._channel.in_lockstep
        return (True, self._of.module.training, True, is_new, self._reduction.buffers_are_due())

    # -- the active side ----------------------------------------------------------------------------------------------

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._of.replaying or reducer.in_backward():
            return
        of = self._of
        if self._channel.in_lockstep:
            of.rehearsal.assume(args, kwargs)
        else:
            self._is_other = of.rehearsal.is_other(args, kwargs)
        if self._is_other and self._channel.declared and of.rehearsal.call is not None:
            raise ValueError(
                f"with steps=, {type(module).__name__} must be called in the same way each time: a rank without data"
                " cannot know of another"
            )
        self._due = self._reduction.buffers_are_due()
        self._channel.announce(self)
        self._drop_outputs()  # before new activations come
        self._begin((args, kwargs))

    def _begin(self, mine: tuple[tuple[Any, ...], dict[str, Any]] | None) -> None:
        """What comes before the module's own collectives."""
        of, (_, _, _, is_other, due) = self._of, self._channel.flags(self)
        leader = self._channel.leader  # has what all start from, also if it has just run out
        if is_other:
            of.replaying = True
            try:
                of.rehearsal.agree(self._collective, self._channel.lead(), mine)
                of.rehearsal.attempt(self._reduction.inner, self._collective.rank)
            except Exception:
                of.rehearsal.call = None
                self._reduction.reset()
                raise
            finally:
                of.replaying = False
        if due:
            self._reduction.sync_buffers(leader)

    def _drop_outputs(self) -> None:
        for each in self.passes:
            if each.real or each.done:
                each.outputs.clear()

    # -- the joined side ----------------------------------------------------------------------------------------------

    @override
    def main_hook(self) -> None:
        self._drop_outputs()
        self._begin(None)
        of, (grad, training, prepares, _, _) = self._of, self._channel.flags(self)
        of.replaying = True
        try:
            with (
                torch.set_grad_enabled(grad > 0),
                in_mode(of.module, training=training > 0),
                self._reduction.reducing(prepares > 0, prepares > 0),
            ):
                self._reduction.buffers_are_due()
                outputs = of.rehearsal.run(of.module)
                if grad:
                    self._reduction.forwarded()
        except Exception as error:
            raise JoinError(of.rehearsal.complaint(of.module, error, self._collective.rank)) from error
        finally:
            of.replaying = False
        if grad:
            self.passes.append(_Pass(list(tensors_with_grad(outputs))))


class ReplayedBackward(_Replayed):
    """A module's backward."""

    what = "backward"
    join_keywords: ClassVar[frozenset[str] | None] = frozenset({"divide_by_initial_world_size"})
    # [gradients are None, gradients are zero, this rank contributes, weights are summed, gradients are reduced, and
    # over all ranks, through other forwards than the last]
    flag_count = 7

    def __init__(self, module: _Module, forward: ReplayedForward) -> None:
        super().__init__(module)
        self._forward = forward
        self._divide_by_initial_world_size = True
        self._weights = Weights(self._reduction.seen)
        self._current: _Graph | None = None  # of the forward that is under way
        self._in_backward = False
        self._entered: _Graph | None = None  # the forward that the backward which is under way has come to
        self._through: list[_Pass] = []  # the forwards that the backward goes through
        self._several = False
        self._weighted = self._complete = False
        self._unsynced = False  # something is accumulated since the last complete reduction
        self._had_data = 0  # in lockstep: the ranks that had data since then, as a bit mask
        self._total: tuple[torch.Tensor, Work] | None = None  # of the weights, under way
        self._contributors = 0.0

    @override
    def join_hook(self, *, divide_by_initial_world_size: bool = True, **kwargs: Any) -> JoinHook:
        self._divide_by_initial_world_size = divide_by_initial_world_size
        return self

    @override
    def attach(self, join: Join) -> None:
        super().attach(join)
        self._join = join
        self._weights.attach(join)
        # What is in ``grad`` is the loop's to clear or keep; what FSDP has accumulated goes into the next reduction.
        self._unsynced = _unsynced.get(self._of.module, False) and not self._reduction.accumulates_in_grad
        self._in_backward = False
        module, entrances = self._of.module, self._reduction.entrances
        before, after = cast("Any", ModuleHook(self._before_forward)), cast("Any", ModuleHook(self._after_forward))
        inside = cast("Any", ModuleHook(self._after_part))
        self._handles = [module.register_forward_pre_hook(before)]
        # FSDP gathers parameters when a gradient enters; the header goes before that, so the hooks are before FSDP's.
        self._handles += [part.register_forward_hook(inside, prepend=True) for part in entrances if part is not module]
        self._handles.append(module.register_forward_hook(after, prepend=True))

    @override
    def detach(self) -> None:
        super().detach()
        self._weights.detach()
        _unsynced[self._of.module] = self._unsynced
        if self._channel.closed:  # on all ranks, which have stopped at the same place, if in the middle of a step
            self._reduction.reset()
        self._in_backward, self._entered, self._current = False, None, None
        self._through = []

    @override
    def synchronise(self, source: int) -> None:
        """Gradients, too, are as on the last joiner: a loop may clear them after its last step."""
        replicated = [parameter for parameter in self._reduction.parameters if not is_dtensor(parameter)]
        cleared, zeroed = adopt_gradients(
            self._collective, replicated, source, accumulated=self._unsynced, also=self._emptiness()
        )
        if self._collective.rank != source:
            self._clear(cleared, zeroed)

    # -- flags --------------------------------------------------------------------------------------------------------

    @override
    def flags(self, active: bool) -> Sequence[bool]:
        if not active:
            return (False, False, self._unsynced, False, False, False, False)
        return (*self._emptiness(), True, self._weighted, *self._reduction.reduces, self._several)

    @override
    def declared_flags(self, weighted: bool) -> Sequence[bool]:
        return (True, False, True, weighted, True, True, False)

    def _emptiness(self) -> tuple[bool, bool]:
        """Whether all gradients are ``None``, and whether those that are not are zero, so nothing is kept."""
        present = [parameter.grad for parameter in self._reduction.parameters if parameter.grad is not None]
        return not present, not any(bool(gradient.any()) for gradient in map(_local, present))

    def _clear(self, cleared: bool, zeroed: bool) -> None:
        """Clear gradients as the active ranks have, but for what is not reduced yet."""
        if self._unsynced and self._reduction.accumulates_in_grad:
            return
        for parameter in self._reduction.parameters:
            if cleared:
                parameter.grad = None
            elif zeroed and parameter.grad is not None:
                _local(parameter.grad).zero_()

    # -- forward ------------------------------------------------------------------------------------------------------

    def _before_forward(self, module: Any, args: Any) -> None:
        if self._of.replaying or reducer.in_backward():
            return
        self._current = _Graph() if torch.is_grad_enabled() else None
        self._in_backward, self._entered = False, None  # a backward that raised did not come to its end

    def _after_part(self, module: Any, args: Any, output: Any) -> None:
        """A part of the module has an output, which the module may return as its own."""
        if self._current is not None and not reducer.in_backward():
            self._watch(output, self._current)

    def _after_forward(self, module: Any, args: Any, output: Any) -> None:
        graph = self._current
        if graph is None or reducer.in_backward():
            return
        outputs = list(tensors_with_grad(output))
        if not outputs and hides_tensors(output):
            raise JoinError(
                f"{type(module).__name__} returns a {type(output).__name__}, in which Join finds no tensor, so it"
                " cannot tell when a backward begins; return tensors, containers of them, or a dataclass"
            )
        self._current = None
        self._reduction.forwarded()
        self._weights.watch()
        self._forward.passes.append(_Pass(outputs, graph))
        self._watch(output, graph)

    def _watch(self, output: Any, graph: _Graph) -> None:
        for tensor in tensors_with_grad(output):
            if not tensor.is_leaf:  # the user's own tensor, passed through: no collective comes after it
                hook = functools.partial(self._gradient_enters, graph)
                cast("Any", tensor).register_hook(hook)

    # -- the active side ----------------------------------------------------------------------------------------------

    def _gradient_enters(self, graph: _Graph, gradient: torch.Tensor) -> None:
        """A gradient enters a forward's outputs: the first one of a backward begins it."""
        if graph is self._entered or self._of.replaying or not self._handles:
            return
        passes = list(self._forward.passes)
        entered = next((each for each in passes if each.graph is not None and each.graph() is graph), None)
        if entered is None:
            raise JoinError(
                f"a backward goes through a forward of {type(self._of.module).__name__} that is more than"
                f" {_REMEMBERED} forwards ago, or of an earlier block"
            )
        entered.done, self._entered = True, graph
        entered.outputs.clear()  # large ones should not outlive the backward
        if self._in_backward:
            if entered not in self._through:
                raise JoinError(self._other_forwards())
            return
        self._in_backward = True
        before = passes[: passes.index(entered)]
        self._through = [*[each for each in before if each.is_pending], entered]
        self._several = self._through != passes[-1:]
        self._weighted = self._weights.in_use
        self._channel.announce(self)
        self._channel.read()
        self._weights.begin_backward(holds_result=False)
        self._begin(complete=self._reduction.reduces[1])
        # Queued now, it runs before those of FSDP and DDP, and what it queues runs after them.
        reducer.after_backward(lambda: reducer.after_backward(self._end_backward))

    def _end_backward(self) -> None:
        self._in_backward, self._entered = False, None
        if not all(each.done for each in self._through):
            raise JoinError(self._other_forwards())
        self._through = []
        self._end()

    def _other_forwards(self) -> str:
        return (
            f"a backward went through other forwards of {type(self._of.module).__name__} than a rank without data can"
            " know: several were made, and neither all of them came into it, nor the last one alone. Run backward"
            " after each forward, or once for all of them; drop the outputs of those that get none"
        )

    # -- both sides ---------------------------------------------------------------------------------------------------

    def _begin(self, *, complete: bool) -> None:
        """What comes before the module's own collectives."""
        flags, announced = self._channel.flags(self), self._channel.announced(self)
        _, _, contributors, weighted, _, _, several = flags
        self._complete, self._total = complete, None
        if self._channel.in_lockstep:
            self._weighted = self._weights.agree()
            self._had_data |= self._channel.active_ranks
            self._contributors = float(self._had_data.bit_count())
        elif 0 < weighted < announced:
            raise ValueError("join.weight is set on some ranks and not on all others; set it on all ranks or on none")
        else:
            self._weighted, self._contributors = weighted > 0, float(contributors)
        if self._weighted and not self._reduction.weighs:
            raise ValueError(
                f"join.weight cannot weigh the gradients of {type(self._of.module).__name__}, in whose forward and"
                " backward ranks compute together; leave it None and multiply the loss by what it should weigh"
            )
        if self._complete and self._weighted:
            total = torch.tensor(self._weights.window, dtype=torch.float64)
            self._total = total, self._collective.all_reduce(total)
        if self._complete and self._scales:
            self._reduction.set_aside()
        if several:
            self._agree_on_forwards()

    @property
    def _scales(self) -> bool:
        if not self._reduction.scales:
            return False
        uneven = self._contributors not in (0.0, float(self._collective.world_size))
        return self._weighted or (uneven and not self._divide_by_initial_world_size)

    def _agree_on_forwards(self) -> None:
        """Let ranks without data know through which forwards the backward goes."""
        newest = len(self._forward.passes) - 1
        mine = sum(1 << (newest - self._forward.passes.index(each)) for each in self._through)
        word = torch.tensor(mine)
        self._collective.all_reduce(word, "max").wait()
        if self._through and int(word) != mine:
            raise JoinError(self._other_forwards())
        self._through = [each for place, each in enumerate(reversed(self._forward.passes)) if int(word) >> place & 1]

    def _end(self) -> None:
        """What comes after the module's own collectives."""
        has_data = not (self._of.replaying or self._join.shadowing)
        self._unsynced = not self._complete and (self._unsynced or has_data)
        if not self._complete:
            return
        self._had_data = 0
        self._weights.forget()
        if not self._scales:
            self._reduction.scale(1.0)
            return
        parts = self._contributors
        if self._total is not None:
            total, work = self._total
            work.wait()
            parts = total.item()
            if parts == 0:
                raise ValueError("join.weight is 0 on all ranks at once, so their gradients have no mean")
        self._reduction.scale(self._collective.world_size / parts)

    # -- the joined side ----------------------------------------------------------------------------------------------

    @override
    def main_hook(self) -> None:
        cleared, zeroed, _, _, reduces, complete, several = self._channel.flags(self)
        announced = self._channel.announced(self)
        self._through = []
        self._clear(cleared == announced, zeroed == announced)
        self._begin(complete=complete > 0)
        if not several:
            self._through = list(self._forward.passes)[-1:]
        outputs = [tensor for each in self._through for tensor in each.outputs]
        if not outputs:
            raise JoinError(
                f"rank {self._collective.rank} cannot take part in the backward of {type(self._of.module).__name__},"
                " because it has dropped the outputs of the forward it is for, or they were none that require grad"
            )
        self._of.replaying = self._weights.silent = True
        try:
            self._weights.watch(always=True)
            with self._reduction.reducing(reduces > 0, complete > 0), torch.enable_grad():
                torch.autograd.backward(outputs, [torch.zeros_like(tensor) for tensor in outputs], retain_graph=True)
            for each in self._through:
                each.done = True
            self._end()
        finally:
            self._of.replaying = self._weights.silent = False
            self._through = []


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that is on this rank."""
    return cast("Any", tensor).to_local() if is_dtensor(tensor) else tensor

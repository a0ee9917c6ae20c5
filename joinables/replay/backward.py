"""The backward of a replayed module: :class:`ReplayedBackward`.

The order of collectives is told in ``joinables.replay``.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import torch
from typing_extensions import override

from join import JoinError, JoinHook
from join.joinable import Block, BurstState
from joinables._torch import autograd
from joinables.dummy_forward import check_backward_on_dummy
from joinables.mean import Mean, Window
from joinables.replacement import ModuleHook
from joinables.replay.forward import ReplayedForward
from joinables.replay.module import REMEMBERED, Graph, Pass, ReplayedBurst, ReplayedModule
from joinables.sharding import is_dtensor
from joinables.tensors import adopt_gradients, hides_tensors, tensors_with_grad
from joinables.weights import Weights, weighs_on_some

# Between blocks: what a rank has not yet reduced.
_windows: weakref.WeakKeyDictionary[torch.nn.Module, Window] = weakref.WeakKeyDictionary()


class BackwardFlags(NamedTuple):
    """What a backward's header tells, and how many ranks said so.

    Attributes:
        cleared: whether all gradients are ``None``.
        zeroed: whether those that are not are zero, so that nothing is kept.
        contributes: whether the rank has something in the reduction.
        weighted: whether weights are summed.
        reduces: whether gradients are reduced.
        completely: whether their sum over all ranks is complete then.
        through_others: whether it goes through other forwards than the last one.
    """

    cleared: int = False
    zeroed: int = False
    contributes: int = False
    weighted: int = False
    reduces: int = False
    completely: int = False
    through_others: int = False


@dataclass(slots=True)
class Backward:
    """The backward that is under way.

    Attributes:
        complete: whether it completes a reduction over all ranks.
        through: the forwards that it goes through.
        entered: the one of them that a gradient has entered last; ``None`` where it is replayed.
        contributors: how many ranks have something in that reduction.
    """

    complete: bool
    through: list[Pass]
    entered: Graph | None = None
    contributors: int = 0


class ReplayedBackward(ReplayedBurst):
    """A module's backward."""

    what = "backward"
    join_keywords: ClassVar[frozenset[str] | None] = frozenset({"divide_by_initial_world_size"})
    flag_count = len(BackwardFlags._fields)

    def __init__(self, module: ReplayedModule, forward: ReplayedForward) -> None:
        super().__init__(module)
        self._forward = forward
        self._weights, self._mean, self._window = Weights(self._reduction.seen), Mean(), Window()
        self._graph: Graph | None = None  # of the forward that is under way
        self._backward: Backward | None = None  # this rank's own that is under way
        self._backwards = 0  # how many this rank has made itself, in this block
        self._has_replayed = False

    @override
    def join_hook(self, *, divide_by_initial_world_size: bool = True, **kwargs: Any) -> JoinHook:
        self._mean.over_all_ranks = divide_by_initial_world_size
        return self

    @override
    def attach(self, join: Block) -> None:
        super().attach(join)
        self._join = join
        self._weights.attach(join)
        window = _windows.pop(self._of.module, None)
        self._window = window if window is not None and self._reduction.holds_accumulated else Window()
        self._backwards = 0
        self._reduction.note_writes()
        module, entrances = self._of.module, self._reduction.entrances
        before, after = cast("Any", ModuleHook(self._before_forward)), cast("Any", ModuleHook(self._after_forward))
        inside = cast("Any", ModuleHook(self._after_part))
        self._handles = [module.register_forward_pre_hook(before)]
        # FSDP gathers parameters when a gradient enters; the header goes before that, so the hooks are before FSDP's.
        self._handles += [part.register_forward_hook(inside, prepend=True) for part in entrances if part is not module]
        self._handles.append(module.register_forward_hook(after, prepend=True))

    @override
    def detach(self) -> None:
        self._weights.detach()
        self._reduction.put_back()
        if self._channel.closed:  # on all ranks, which have stopped at the same place, if in the middle of a step
            self._reduction.reset()
        elif self._window.unreduced:  # what it has accumulated goes into the next reduction
            _windows[self._of.module] = self._window
        super().detach()
        del self._join
        self._graph = self._backward = None

    @property
    @override
    def own_steps(self) -> int:
        return self._backwards

    @override
    def synchronise(self, source: int) -> None:
        """Gradients, too, are as on the last joiner: a loop may clear them after its last step."""
        replicated = [parameter for parameter in self._reduction.parameters if not is_dtensor(parameter)]
        cleared, zeroed = adopt_gradients(
            self._collective, replicated, source, accumulated=self._window.unreduced, also=self._reduction.emptiness()
        )
        if self._collective.rank != source:
            self._reduction.clear(to_none=cleared, to_zero=zeroed, unreduced=self._window.unreduced)

    # -- flags --------------------------------------------------------------------------------------------------------

    @override
    def flags(self, active: bool) -> BackwardFlags:
        if not active:
            return BackwardFlags(contributes=self._window.unreduced)
        assert self._backward is not None
        through_others = self._backward.through != [self._forward.passes[-1]]
        return BackwardFlags(
            *self._reduction.emptiness(), True, self._mean.weighted, *self._reduction.reduces, through_others
        )

    @override
    def declared_flags(self, weighted: bool) -> BackwardFlags:
        reduces, completely = self._reduction.reduces if self._channel.all_ranks_run_bursts else (True, True)
        return BackwardFlags(cleared=True, contributes=True, weighted=weighted, reduces=reduces, completely=completely)

    # -- forward ------------------------------------------------------------------------------------------------------

    def _before_forward(self, module: Any, args: Any) -> None:
        if self._of.dry_run.is_running or autograd.in_backward():
            return
        self._graph = Graph() if torch.is_grad_enabled() else None
        self._backward = None  # one that raised did not come to its end

    def _after_part(self, module: Any, args: Any, output: Any) -> None:
        """Watch the output of a part of the module, which the module may return as its own."""
        if self._graph is not None and not autograd.in_backward():
            self._watch(output, self._graph)

    def _after_forward(self, module: Any, args: Any, output: Any) -> None:
        graph = self._graph
        if graph is None or autograd.in_backward():
            return
        outputs = tensors_with_grad(output)
        if not outputs and hides_tensors(output):
            raise JoinError(
                f"{type(module).__name__} returns a {type(output).__name__}, in which Join finds no tensor, so it"
                " cannot tell when a backward begins; return tensors, containers of them, or a dataclass [J150]"
            )
        self._graph = None
        self._reduction.forwarded()
        self._weights.watch()
        self._forward.passes.append(Pass(outputs, weakref.ref(graph), on_dummy=self._channel.step.shadowing))
        self._watch(output, graph)

    def _watch(self, output: Any, graph: Graph) -> None:
        for tensor in tensors_with_grad(output):
            if not tensor.is_leaf:  # the user's own tensor, passed through: no collective comes after it
                autograd.on_gradient(tensor, functools.partial(self._gradient_enters, graph))

    # -- the active side ----------------------------------------------------------------------------------------------

    def _gradient_enters(self, graph: Graph, gradient: torch.Tensor) -> None:
        """Begin a backward with the first gradient of it that enters a forward's outputs."""
        backward = self._backward
        if backward is not None and graph is backward.entered:
            return
        if self._weights.silent or not self._handles:
            return
        passes = list(self._forward.passes)
        entered = next((each for each in reversed(passes) if each.graph is not None and each.graph() is graph), None)
        if entered is None:
            raise JoinError(
                f"a backward goes through a forward of {type(self._of.module).__name__} that is more than"
                f" {REMEMBERED} forwards ago, or of an earlier block; run backward in the block of the forward, and"
                " before many others [J151]"
            )
        if backward is not None:
            if entered not in backward.through:
                raise JoinError(self._other_forwards())
        elif change := self._weights.change():
            raise change  # nothing was announced yet
        if entered.on_dummy:
            check_backward_on_dummy(self._channel, self._of.module)
        entered.done = True
        entered.outputs.clear()  # large ones should not outlive the backward
        if backward is not None:
            backward.entered = graph
            return
        before = passes[: passes.index(entered)]
        through = [*[each for each in before if not each.done and each.is_alive], entered]
        backward = self._backward = Backward(self._reduction.reduces[1], through, graph)
        self._backwards += 1
        self._mean.weighted = self._weights.in_use
        self._channel.announce(self)
        if self._join.weight is not None:
            self._window.weight += self._weights.begin_backward()
        self._begin(backward)
        autograd.after_reduction(functools.partial(self._end_own, backward))

    def _end_own(self, backward: Backward) -> None:
        self._backward = None
        self.state = BurstState.IDLE
        for each in backward.through:
            if not each.done:
                raise JoinError(self._other_forwards())
        self._end(backward)

    def _other_forwards(self) -> str:
        return (
            f"a backward went through other forwards of {type(self._of.module).__name__} than a rank without data can"
            " know: several were made, and neither all of them came into it, nor the last one alone. Run backward"
            " after each forward, or once for all of them; drop the outputs of those that get none [J152]"
        )

    # -- both sides ---------------------------------------------------------------------------------------------------

    def _begin(self, backward: Backward) -> None:
        """Agree on what is to be summed; called right before the module's own collectives."""
        flags, announced = BackwardFlags(*self._channel.flags(self)), self._channel.announced(self)
        if 0 < flags.reduces < announced or 0 < flags.completely < announced:
            raise ValueError(
                f"{type(self._of.module).__name__} is to reduce gradients in this backward on some ranks and not on"
                " others: set_requires_gradient_sync and its like must be set alike on all; over join.iterate,"
                " join.is_last_step tells all where to step a window that is not full [J153]"
            )
        mean, window = self._mean, self._window
        if self._channel.all_ranks_run_bursts:
            self._weights.agree(window)
            if self._weights.refused is not None:
                raise self._weights.refused  # on all ranks, before the module's own collectives
            mean.weighted = self._weights.agreed
        elif 0 < flags.weighted < announced:
            raise weighs_on_some(flags.weighted, announced - flags.weighted)
        else:
            mean.weighted = flags.weighted > 0
        if mean.weighted and not self._reduction.weighs:
            raise ValueError(
                f"join.weight cannot weigh the gradients of {type(self._of.module).__name__}, in whose forward and"
                " backward ranks compute together; leave it None and multiply the loss by what it should weigh [J154]"
            )
        self.state = BurstState.RUNNING  # what was refused until here is refused on all ranks
        if window.unreduced and window.weighted != mean.weighted:
            raise ValueError(
                f"join.weight was set or unset in a window of accumulation of {type(self._of.module).__name__}; set it"
                " at every step or at none [J292]"
            )
        backward.contributors = flags.contributes
        if (with_data := self._channel.step.contributors) is not None:
            window.with_data |= with_data
            backward.contributors = window.with_data.bit_count()
        is_uneven = backward.contributors not in (0, self._collective.world_size)
        will_scale = mean.weighted or (mean.scales and is_uneven)
        begins_to_accumulate = mean.scales and self._reduction.accumulates_in_grad  # on top of the last result
        if self._reduction.scales and (will_scale if backward.complete else begins_to_accumulate):
            self._reduction.set_aside(accumulated=window.unreduced)
        if backward.complete:
            mean.begin(self._channel.sum(window.weight) if mean.weighted else None)
        if flags.through_others:
            self._agree_on_forwards(backward)

    def _agree_on_forwards(self, backward: Backward) -> None:
        """Let ranks without data know through which forwards the backward goes."""
        newest_first = list(reversed(self._forward.passes))
        mine = sum(1 << newest_first.index(each) for each in backward.through)
        # The largest mask and the smallest, of the ranks that run the backward themselves.
        words = torch.tensor([mine, -mine if mine else -(1 << REMEMBERED)])
        self._collective.all_reduce(words, "max").wait()
        most, least = int(words[0]), -int(words[1])
        if most != least:
            raise JoinError(self._other_forwards())
        backward.through = [each for place, each in enumerate(newest_first) if most >> place & 1]

    def _end(self, backward: Backward) -> None:
        """Make the mean of the result; called right after the module's own collectives."""
        if not backward.complete:
            if not (self._weights.silent or self._channel.step.shadowing):
                self._window.unreduced, self._window.weighted = True, self._mean.weighted
            return
        self._window, factor = Window(), 1.0
        if self._reduction.scales and self._mean.scales:
            factor = self._mean.factor(self._collective.world_size, lambda: backward.contributors)
        self._reduction.scale(factor)
        self._reduction.note_writes()

    # -- the joined side ----------------------------------------------------------------------------------------------

    @override
    def main_hook(self) -> None:
        flags, announced = BackwardFlags(*self._channel.flags(self)), self._channel.announced(self)
        to_none, to_zero = flags.cleared == announced, flags.zeroed == announced
        self._reduction.clear(to_none=to_none, to_zero=to_zero, unreduced=self._window.unreduced)
        last = list(self._forward.passes)[-1:]
        backward = Backward(flags.completely > 0, [] if flags.through_others else last)
        self._begin(backward)
        outputs = [tensor for each in backward.through for tensor in each.outputs]
        if not outputs:
            raise JoinError(
                f"rank {self._collective.rank} cannot take part in the backward of {type(self._of.module).__name__},"
                " because it has dropped the outputs of the forward it is for, or they were none that require grad"
                "; keep the outputs until the backward [J155]"
            )
        self._weights.silent = True
        try:
            self._weights.watch(always=True)
            with self._reduction.reducing(flags.reduces > 0, flags.completely > 0), torch.enable_grad():
                torch.autograd.backward(outputs, [torch.zeros_like(tensor) for tensor in outputs], retain_graph=True)
            for each in backward.through:
                each.done = True
            self._end(backward)
        finally:
            self._weights.silent = False
        if not (self._has_replayed or self._channel.leaving):
            self._has_replayed = True
            self._warn_of_shards_that_stay()  # where a warning that is an error can be told the others

    def _warn_of_shards_that_stay(self) -> None:
        shards = {id(parameter) for parameter in self._reduction.parameters if is_dtensor(parameter)}
        optimizers = [each for each in self._channel.targets if isinstance(each, torch.optim.Optimizer)]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        if shards and shards.isdisjoint(id(parameter) for group in groups for parameter in group["params"]):
            warnings.warn(
                f"rank {self._collective.rank} is out of data and takes part in the backward of"
                f" {type(self._of.module).__name__}, but no optimizer of its parameters is in the list: if others step"
                " one, the shards of this rank stay as they are. List the optimizer, too",
                stacklevel=2,
            )

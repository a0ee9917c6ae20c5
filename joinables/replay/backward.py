"""The backward of a replayed module: :class:`ReplayedBackward`.

The order of collectives is told in ``joinables.replay``.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import MutableMapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from join import JoinError, JoinHook
from join.joinable import Block, BurstState
from joinables._torch import autograd
from joinables._torch.hooks import ModuleHook
from joinables.mean import Mean
from joinables.replay.forward import ReplayedForward
from joinables.replay.module import REMEMBERED, Graph, Pass, ReplayedBurst, ReplayedModule
from joinables.sharding import is_dtensor
from joinables.tensors import adopt_gradients, hides_tensors, tensors_with_grad
from joinables.weights import Weights, weighs_on_some
from joinables.window import Window

# Over blocks: what a rank has not yet reduced.
_unsynced: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()


class ReplayedBackward(ReplayedBurst):
    """A module's backward."""

    what = "backward"
    join_keywords: ClassVar[frozenset[str] | None] = frozenset({"divide_by_initial_world_size"})
    # [gradients are None, gradients are zero, this rank contributes, weights are summed, gradients are reduced, and
    # over all ranks, through other forwards than the last]
    flag_count = 7

    def __init__(self, module: ReplayedModule, forward: ReplayedForward) -> None:
        super().__init__(module)
        self._forward = forward
        self._weights, self._mean, self._window = Weights(self._reduction.seen), Mean(), Window()
        self._current: Graph | None = None  # of the forward that is under way
        self._in_backward = self._has_replayed = False
        self._backwards = 0  # how many this rank has made itself, in this block
        self._entered: Graph | None = None  # the forward that the backward which is under way has come to
        self._through: list[Pass] = []  # the forwards that the backward goes through
        self._several = False  # these are not just the last forward
        self._complete = False  # the backward under way completes a reduction over all ranks
        self._contributors = 0.0
        # How often gradients were written to, in place, when the last reduction ended.
        self._written: MutableMapping[torch.Tensor, int] = WeakTensorKeyDictionary()

    @override
    def join_hook(self, *, divide_by_initial_world_size: bool = True, **kwargs: Any) -> JoinHook:
        self._mean.over_all_ranks = divide_by_initial_world_size
        return self

    @override
    def attach(self, join: Block) -> None:
        super().attach(join)
        self._join = join
        self._weights.attach(join)
        # What is in ``grad`` is the loop's to clear or keep; what FSDP has accumulated goes into the next reduction.
        self._window.own = _unsynced.get(self._of.module, False) and not self._reduction.accumulates_in_grad
        self._in_backward, self._backwards = False, 0
        self._note_writes()
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
        _unsynced[self._of.module] = self._window.own
        if self._channel.closed:  # on all ranks, which have stopped at the same place, if in the middle of a step
            self._reduction.reset()
        super().detach()
        del self._join
        self._in_backward, self._entered, self._current = False, None, None
        self._through = []

    @property
    @override
    def own_steps(self) -> int:
        return self._backwards

    @override
    def synchronise(self, source: int) -> None:
        """Gradients, too, are as on the last joiner: a loop may clear them after its last step."""
        replicated = [parameter for parameter in self._reduction.parameters if not is_dtensor(parameter)]
        cleared, zeroed = adopt_gradients(
            self._collective, replicated, source, accumulated=self._window.own, also=self._emptiness()
        )
        if self._collective.rank != source:
            self._clear(cleared, zeroed)

    # -- flags --------------------------------------------------------------------------------------------------------

    @override
    def flags(self, active: bool) -> Sequence[bool]:
        if not active:
            return (False, False, self._window.own, False, False, False, False)
        return (*self._emptiness(), True, self._mean.weighted, *self._reduction.reduces, self._several)

    @override
    def declared_flags(self, weighted: bool) -> Sequence[bool]:
        reduces = (True, True) if self._channel.ranks_with_data is None else self._reduction.reduces
        return (True, False, True, weighted, *reduces, False)

    def _emptiness(self) -> tuple[bool, bool]:
        """Whether all gradients are ``None``, and whether those that are not were zeroed, so nothing is kept.

        A rank's shard may be zero, or empty, where others are not; if it was zeroed, something wrote to it, too.
        """
        present = self._present_gradients()
        kept = any(
            self._written.get(gradient) == autograd.writes(gradient) or bool(_local(gradient).any())
            for gradient in present
        )
        return not present, not kept

    def _present_gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._reduction.parameters if parameter.grad is not None]

    def _note_writes(self) -> None:
        for gradient in self._present_gradients():
            self._written[gradient] = autograd.writes(gradient)

    def _clear(self, cleared: bool, zeroed: bool) -> None:
        """Clear gradients as the active ranks have, but for what is not reduced yet."""
        if self._window.own and self._reduction.accumulates_in_grad:
            return
        for parameter in self._reduction.parameters:
            if cleared:
                parameter.grad = None
            elif zeroed and parameter.grad is not None:
                _local(parameter.grad).zero_()

    # -- forward ------------------------------------------------------------------------------------------------------

    def _before_forward(self, module: Any, args: Any) -> None:
        if self._of.replaying or autograd.in_backward():
            return
        self._current = Graph() if torch.is_grad_enabled() else None
        self._in_backward, self._entered = False, None  # a backward that raised did not come to its end

    def _after_part(self, module: Any, args: Any, output: Any) -> None:
        """A part of the module has an output, which the module may return as its own."""
        if self._current is not None and not autograd.in_backward():
            self._watch(output, self._current)

    def _after_forward(self, module: Any, args: Any, output: Any) -> None:
        graph = self._current
        if graph is None or autograd.in_backward():
            return
        outputs = tensors_with_grad(output)
        if not outputs and hides_tensors(output):
            raise JoinError(
                f"{type(module).__name__} returns a {type(output).__name__}, in which Join finds no tensor, so it"
                " cannot tell when a backward begins; return tensors, containers of them, or a dataclass [J150]"
            )
        self._current = None
        self._reduction.forwarded()
        self._weights.watch()
        self._forward.passes.append(Pass(outputs, graph))
        self._watch(output, graph)

    def _watch(self, output: Any, graph: Graph) -> None:
        for tensor in tensors_with_grad(output):
            if not tensor.is_leaf:  # the user's own tensor, passed through: no collective comes after it
                autograd.on_gradient(tensor, functools.partial(self._gradient_enters, graph))

    # -- the active side ----------------------------------------------------------------------------------------------

    def _gradient_enters(self, graph: Graph, gradient: torch.Tensor) -> None:
        """A gradient enters a forward's outputs: the first one of a backward begins it."""
        if graph is self._entered or self._of.replaying or not self._handles:
            return
        passes = list(self._forward.passes)
        entered = next((each for each in passes if each.graph is not None and each.graph() is graph), None)
        if entered is None:
            raise JoinError(
                f"a backward goes through a forward of {type(self._of.module).__name__} that is more than"
                f" {REMEMBERED} forwards ago, or of an earlier block; run backward in the block of the forward, and"
                " before many others [J151]"
            )
        if not self._in_backward and (change := self._weights.change()):
            raise change  # nothing was announced yet
        entered.done, self._entered = True, graph
        entered.outputs.clear()  # large ones should not outlive the backward
        if self._in_backward:
            if entered not in self._through:
                raise JoinError(self._other_forwards())
            return
        self._in_backward = True
        self._backwards += 1
        before = passes[: passes.index(entered)]
        self._through = [*[each for each in before if each.is_pending], entered]
        self._several = self._through != passes[-1:]
        self._mean.weighted = self._weights.in_use
        self._channel.announce(self)
        if self._join.weight is not None:
            self._window.weight += self._weights.begin_backward()
        self._begin(complete=self._reduction.reduces[1])
        autograd.after_reduction(self._end_backward)

    def _end_backward(self) -> None:
        self._in_backward, self._entered = False, None
        self.state = BurstState.IDLE
        if not all(each.done for each in self._through):
            raise JoinError(self._other_forwards())
        self._through = []
        self._end()

    def _other_forwards(self) -> str:
        return (
            f"a backward went through other forwards of {type(self._of.module).__name__} than a rank without data can"
            " know: several were made, and neither all of them came into it, nor the last one alone. Run backward"
            " after each forward, or once for all of them; drop the outputs of those that get none [J152]"
        )

    # -- both sides ---------------------------------------------------------------------------------------------------

    def _begin(self, *, complete: bool) -> None:
        """What comes before the module's own collectives."""
        flags, announced = self._channel.flags(self), self._channel.announced(self)
        _, _, contributors, weighted, reduces, completely, several = flags
        if 0 < reduces < announced or 0 < completely < announced:
            raise ValueError(
                f"{type(self._of.module).__name__} is to reduce gradients in this backward on some ranks and not on"
                " others: set_requires_gradient_sync and its like must be set alike on all; over join.iterate,"
                " join.is_last_step tells all where to step a window that is not full [J153]"
            )
        self._complete, mean, window = complete, self._mean, self._window
        with_data = self._channel.ranks_with_data
        if with_data is not None:
            mean.weighted, accumulated = self._weights.agree(window.own)
            if self._weights.refused is not None:
                raise self._weights.refused  # on all ranks, before the module's own collectives
            window.with_data |= with_data | accumulated
            contributors = window.with_data.bit_count()
        elif 0 < weighted < announced:
            raise weighs_on_some(weighted, announced - weighted)
        else:
            mean.weighted = weighted > 0
        self._contributors = float(contributors)
        if mean.weighted and not self._reduction.weighs:
            raise ValueError(
                f"join.weight cannot weigh the gradients of {type(self._of.module).__name__}, in whose forward and"
                " backward ranks compute together; leave it None and multiply the loss by what it should weigh [J154]"
            )
        self.state = BurstState.RUNNING  # what was refused until here is refused on all ranks
        if complete:
            mean.begin(self._channel.sum(window.weight) if mean.weighted else None)
            is_uneven = contributors not in (0, self._collective.world_size)
            if self._reduction.scales and (mean.weighted or (mean.scales and is_uneven)):
                self._reduction.set_aside()
        if several:
            self._agree_on_forwards()

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
        if not self._complete:
            self._window.own |= not (self._of.replaying or self._join.shadowing)
            return
        self._window, factor = Window(), 1.0
        if self._reduction.scales and self._mean.scales:
            factor = self._mean.factor(self._collective.world_size, lambda: self._contributors)
        self._reduction.scale(factor)
        self._note_writes()

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
                "; keep the outputs until the backward [J155]"
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
        if not (self._has_replayed or self._channel.leaving):
            self._has_replayed = True
            self._warn_of_shards_that_stay()  # where a warning that is an error can be told the others

    def _warn_of_shards_that_stay(self) -> None:
        shards = {id(parameter) for parameter in self._reduction.parameters if is_dtensor(parameter)}
        groups = [
            group
            for each in self._channel.targets
            if isinstance(each, torch.optim.Optimizer)
            for group in each.param_groups
        ]
        if shards.isdisjoint(id(parameter) for group in groups for parameter in group["params"]) and shards:
            warnings.warn(
                f"rank {self._collective.rank} is out of data and takes part in the backward of"
                f" {type(self._of.module).__name__}, but no optimizer of its parameters is in the list: if others step"
                " one, the shards of this rank stay as they are. List the optimizer, too",
                stacklevel=2,
            )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that is on this rank."""
    return cast("Any", tensor).to_local() if is_dtensor(tensor) else tensor

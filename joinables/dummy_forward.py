"""Modules that cannot take an empty batch, in a loop over ``Join.iterate``: :class:`DummyForward`.

A rank without data runs such a module on the batch of another rank, and hands out its outputs at length 0 (a number,
such as a loss, as 0), through which gradients of 0 go back. In the first step of a loop in which a rank has no data,
and for each forward with grad in that step::

    rank with data                                       rank with an empty dummy
    --------------                                       ------------------------
    the lowest: what it calls the module with            what to call it with
    (broadcast)
    only where forwards communicate (fully_shard):       the same
    an attempt on an empty batch, once for each kind
    its forward                                          the forward on the empty batch; if that raises, or the attempt
                                                         has, on that call

"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree
from typing_extensions import override

from join import Join
from join.batch import map_tensors, tensors_in
from join.collectives.broken import is_broken
from join.transfer import broadcast_tree
from joinables._torch_reducer import not_compiled

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class DummyForward:
    """What a module runs on, on ranks without data.

    Args:
        join: the block.
    """

    def __init__(self, join: Join) -> None:
        self._channel, self._collective = join.channel, join.collective
        self._told: list[Arguments | None] = []  # in this loop: by the number of the forward in its step
        self._loop = self._step = self._forward = 0

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """What a rank without data may call the module with; called on all ranks, before each forward of the loop.

        One without grad sends nothing, since not all ranks need to run it: it is what the first one with grad was.

        Args:
            args: what this rank calls it with.
            kwargs: the same, by name.

        Returns:
            What the lowest rank with data called it with in the first such forward; ``None`` while all ranks have data,
            and if it cannot be sent to other ranks.
        """
        channel = self._channel
        if channel.loop != self._loop:
            self._loop, self._told, self._step = channel.loop, [], 0
        if channel.steps != self._step:
            self._step, self._forward = channel.steps, 0
        number = 0
        if torch.is_grad_enabled():
            number, self._forward = self._forward, self._forward + 1
        elif not self._told:
            return None
        if channel.all_have_data:
            return None
        if number == len(self._told):
            self._told.append(self._tell((args, kwargs)))
        return self._told[number]

    def _tell(self, mine: Arguments) -> Arguments | None:
        source = self._channel.first_active
        is_source = self._collective.rank == source
        try:
            return broadcast_tree(self._collective, _detached(mine) if is_source else None, source)
        except (RuntimeError, TypeError) as error:
            if is_broken(error):
                raise  # another rank is gone
            return None  # it cannot be pickled: on all ranks alike


def emptied_output(output: Any, arguments: Any) -> Any:
    """``output`` with tensors of length 0, and numbers of 0; a backward from them gives gradients of 0.

    Args:
        output: of a module that ran on other ``arguments``.
        arguments: what it was called with, and what gets gradients of 0, too.
    """
    tensors = list(tensors_in(output))
    linked = [tensor for tensor in tensors_in(arguments) if tensor.requires_grad]
    emptied = iter(cast("tuple[torch.Tensor, ...]", _Emptied.apply(len(tensors), *tensors, *linked)))
    return map_tensors(lambda _: next(emptied), output)


class _Emptied(torch.autograd.Function):
    """Of the first ``count`` tensors, each without its rows."""

    @staticmethod
    @override
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.inputs = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        outputs = tuple(tensor[:0].clone() if tensor.dim() else torch.zeros_like(tensor) for tensor in tensors[:count])
        needs = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(*[each for each, needed in zip(outputs, needs, strict=False) if not needed])
        return outputs

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # An output of which nothing is made is to get no gradient, as on ranks with data; the arguments always do.
        used = [gradient is not None for gradient in gradients] + [True] * (len(ctx.inputs) - len(gradients))
        zeros = [
            torch.zeros(shape, dtype=dtype, device=device) if is_used and needs else None
            for is_used, needs, (shape, dtype, device) in zip(used, ctx.needs_input_grad[1:], ctx.inputs, strict=True)
        ]
        return None, *zeros


class InnerForward:
    """Stands in a module's ``forward`` until it is removed: calls ``run(forward, args, kwargs)``.

    Args:
        module: whose ``forward`` it is.
        run: what is run instead.
    """

    def __init__(self, module: torch.nn.Module, run: Callable[..., Any]) -> None:
        self._attributes, self._run = vars(module), run
        self._own: Callable[..., Any] | None = self._attributes.get("forward")  # the user's, of the module itself
        self._forward = module.forward
        self._attributes["forward"] = self

    @not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it, once."""
        self.remove()
        return self._run(self._forward, args, kwargs)

    def remove(self) -> None:
        """Give the module its own forward back."""
        if self._attributes.get("forward") is self:
            if self._own is None:
                del self._attributes["forward"]
            else:
                self._attributes["forward"] = self._own


def _detached(arguments: Arguments) -> Arguments:
    """The same tensors, without the graphs that they come from."""
    return map_tensors(torch.Tensor.detach, arguments)


def with_tensors_of(told: Arguments, mine: Arguments) -> Arguments:
    """This rank's arguments with copies of the tensors that it was told.

    If its own are of another kind, it is what it was told.
    """
    leaves, structure = pytree.tree_flatten(mine)
    others, other_structure = pytree.tree_flatten(told)
    if structure != other_structure:
        return told
    pairs = zip(leaves, others, strict=True)
    return pytree.tree_unflatten(
        [other.clone() if isinstance(other, torch.Tensor) else leaf for leaf, other in pairs], structure
    )

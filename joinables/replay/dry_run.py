"""How a rank without data runs a module: :class:`Call`, what it runs it with, and :class:`DryRun`, how.

The arguments are those of an active rank, without rows: tensors ``[0, ...]``, everything else as it is. One rank tells
them to all the first time, and again when a call is of another kind (other keywords, strings, dtypes). Before it first
counts, every rank tries it once, without gradients, so that a module that cannot take it fails on all ranks at the same
place, where nobody waits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch

from join import JoinError
from join.batch import tensors_in
from join.collectives import Collective
from join.collectives._torch_private import pytree
from join.collectives.broken import is_broken
from join.errors import described
from join.loop.dummies import emptied
from join.transfer import broadcast_tree
from joinables.dummy_forward import Arguments
from joinables.train_mode import keeping_modes

Example = tuple[Any, ...] | Callable[[], Arguments]

_HINT = (
    "Say with what, where the module is listed: Replay(module, example=...), a tuple of positional arguments or a"
    " function that returns (args, kwargs)"
)


class Call(NamedTuple):
    """What a module is called with.

    Attributes:
        args: positional arguments.
        kwargs: keyword arguments.
        require_grad: for each tensor in them, whether it requires grad.
        autocast: the dtype of autocast, if it is on.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    require_grad: tuple[bool, ...]
    autocast: torch.dtype | None

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Call:
        """The call with these arguments, in this context."""
        require_grad = tuple(tensor.requires_grad for tensor in tensors_in((args, kwargs)))
        autocasts = torch.is_autocast_enabled(device.type)
        return Call(args, kwargs, require_grad, torch.get_autocast_dtype(device.type) if autocasts else None)

    @property
    def kind(self) -> Any:
        """What makes a difference to the collectives that the module runs: not sizes, and not numbers."""
        leaves, structure = pytree.tree_flatten((self.args, self.kwargs))
        return structure, [_kind_of(leaf) for leaf in leaves], self.require_grad, self.autocast


class DryRun:
    """How ranks without data run one module: with which call, and whether the module can take it.

    Args:
        device: where it computes.
        example: what to call it with, if not with empty tensors.
    """

    def __init__(self, device: torch.device, example: Example | None) -> None:
        self._device, self.example = device, example
        self._attempted: list[Any] = []  # kinds of calls
        self._refused: list[Any] = []  # those that the module cannot take
        self.call: Call | None = None
        """What to run it with, once the ranks have agreed."""
        self.is_running = False
        """Whether this rank runs the module for its collectives alone, so that hooks must not announce."""

    def is_other(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call with these arguments has to be told to all."""
        if self.call is None:
            return True
        if self.example is not None:
            return False
        mine = Call.of(args, kwargs, self._device)
        if not torch.is_grad_enabled():  # what requires grad makes no difference
            mine = mine._replace(require_grad=self.call.require_grad)
        return mine.kind != self.call.kind

    def agree(self, collective: Collective, source: int, mine: Arguments | None) -> None:
        """Let all ranks have the call of rank ``source``; ``mine`` is what this rank calls the module with, if it does.

        Raises:
            JoinError: if it cannot be sent; on all ranks.
        """
        example = self.arguments_of_example()
        if example is not None:
            self.call = Call.of(*example, self._device)
            return
        call, why_not = self._told(collective, source, mine)
        if call is None:
            raise JoinError(
                f"a rank without data cannot be told what to call the module with: {why_not}. {_HINT} [J156]"
            )
        self.call = call

    def _told(self, collective: Collective, source: int, mine: Arguments | None) -> tuple[Call | None, str]:
        """The call of rank ``source`` without rows, on all ranks; or ``None``, and why it cannot be sent."""
        told: tuple[Call | None, str] = None, ""
        if collective.rank == source:
            assert mine is not None
            try:
                args, kwargs = emptied(mine)
                told = Call.of(args, kwargs, self._device), ""
            except Exception as error:  # the others wait to be told
                told = None, described(error)
        try:
            call, why_not = broadcast_tree(collective, told, source)
        except (RuntimeError, TypeError) as error:
            if is_broken(error):
                raise  # another rank is gone
            return None, str(error)  # of pickling, on all ranks
        if call is not None:  # what was sent requires no grad
            for tensor, requires_grad in zip(tensors_in((call.args, call.kwargs)), call.require_grad, strict=True):
                tensor.requires_grad_(requires_grad)
        return call, why_not

    def arguments_of_example(self) -> Arguments | None:
        """The ``(args, kwargs)`` of the user's ``example``; ``None`` without one."""
        if self.example is None:
            return None
        return self.example() if callable(self.example) else (self.example, {})

    def run(self, module: torch.nn.Module, rank: int) -> Any:
        """Run ``module`` as agreed and return its output; ``rank`` is this one.

        Raises:
            JoinError: if it cannot take the call.
        """
        call = self.call
        assert call is not None
        dtype = call.autocast
        self.is_running = True
        try:
            with torch.autocast(self._device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False):
                return module(*call.args, **call.kwargs)
        except Exception as error:
            if is_broken(error):
                raise  # another rank is gone
            with_what = "an empty batch" if self.example is None else f"example={self.example!r}"
            raise JoinError(
                f"rank {rank} cannot run {type(module).__name__} on {with_what}, as a rank without data has to:"
                f" {described(error)}. {_HINT} [J157]"
            ) from error
        finally:
            self.is_running = False

    def attempt(self, module: torch.nn.Module, rank: int) -> None:
        """Run ``module`` for nothing, on all ranks, once for each kind of call.

        Raises:
            JoinError: if it cannot take the call; on all ranks.
        """
        assert self.call is not None
        if self.call.kind not in self._attempted:
            with torch.no_grad(), in_mode(module, training=False):
                self.run(module, rank)
            self._attempted.append(self.call.kind)

    def takes_empty(self, module: torch.nn.Module, collective: Collective, source: int, mine: Arguments) -> bool:
        """Whether ``module`` can take the call of rank ``source`` without rows: tried once for each kind of call.

        The same on all ranks, each of which is about to make a call of its own, ``mine``.
        """
        call, _ = self._told(collective, source, mine)
        if call is None:
            return True  # an error, if there is one, comes from the module itself
        kept, self.call = self.call, call
        kind = self.call.kind
        try:
            if kind not in self._refused:
                self.attempt(module, collective.rank)
        except JoinError:
            self._refused.append(kind)
        finally:
            self.call = kept
        return kind not in self._refused


@contextmanager
def in_mode(module: torch.nn.Module, *, training: bool) -> Generator[None]:
    """Within the context, ``module`` is in training mode or in evaluation, and each part as it was afterwards."""
    if module.training == training:
        yield
        return
    with keeping_modes(module):
        module.train(training)
        yield


def _kind_of(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.dim()
    return leaf if isinstance(leaf, (bool, str)) or leaf is None else cast("type[object]", type(leaf))

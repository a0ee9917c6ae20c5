"""How a rank without data runs a module: :class:`Call`, what it runs it with, and :class:`DryRun`, how.

The arguments are those of an active rank, without rows: tensors ``[0, ...]``, everything else as it is. One rank tells
them to all the first time, and again when a call is of another kind (other keywords, strings, dtypes). Before it first
counts, every rank tries it once, without gradients, so that a module that cannot take it fails on all ranks at the same
place, where nobody waits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from join import JoinError
from join.collectives import Collective
from join.collectives._torch_private import pytree
from join.collectives.broken import is_broken
from join.errors import described
from join.loop.dummies import emptied
from join.transfer import broadcast_tree
from joinables.train_mode import keeping_modes

Example = tuple[Any, ...] | Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]

_HINT = (
    "Say with what, where the module is listed: Replay(module, example=...), a tuple of positional arguments or a"
    " function that returns (args, kwargs)"
)


@dataclass(frozen=True)
class Call:
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
        return Call(args, kwargs, tuple(tensor.requires_grad for tensor in _tensors((args, kwargs))), _autocast(device))

    @property
    def kind(self) -> Any:
        """What makes a difference to the collectives that the module runs: not sizes, and not numbers."""
        leaves, structure = pytree.tree_flatten((self.args, self.kwargs))
        return structure, [_kind_of(leaf) for leaf in leaves], self.require_grad, self.autocast

    @property
    def without_rows(self) -> Call:
        """The same with empty tensors."""
        with torch.no_grad():  # nothing of the graph that they come from is held
            args, kwargs = emptied((self.args, self.kwargs))
        return Call(args, kwargs, self.require_grad, self.autocast)

    @property
    def parts(self) -> tuple[Any, ...]:
        """What it is made of, to be sent."""
        return self.args, self.kwargs, self.require_grad, self.autocast

    @property
    def prepared(self) -> Call:
        """The same, its tensors requiring grad as they should; it is changed in place."""
        for tensor, requires_grad in zip(_tensors((self.args, self.kwargs)), self.require_grad, strict=True):
            tensor.requires_grad_(requires_grad)
        return self


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

    def is_other(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call with these arguments has to be told to all."""
        if self.call is None:
            return True
        if self.example is not None:
            return False
        mine = Call.of(args, kwargs, self._device)
        if not torch.is_grad_enabled():  # what requires grad makes no difference
            mine = replace(mine, require_grad=self.call.require_grad)
        return mine.kind != self.call.kind

    def agree(self, collective: Collective, source: int, mine: tuple[tuple[Any, ...], dict[str, Any]] | None) -> None:
        """Let all ranks have the call of rank ``source``.

        Args:
            collective: the group.
            source: a rank that is about to call the module.
            mine: what this rank is about to call it with, if it is.
        """
        example = self.arguments_of_example()
        if example is not None:
            args, kwargs = example
            self.call = Call.of(args, kwargs, self._device)
            return
        parts: tuple[Any, ...] | None = None
        wrong = ""
        if collective.rank == source:
            assert mine is not None
            try:
                parts = Call.of(*mine, self._device).without_rows.parts
            except Exception as error:  # the others wait to be told
                wrong = described(error)
        try:
            parts, wrong = broadcast_tree(collective, (parts, wrong), source)
        except (RuntimeError, TypeError) as error:
            if is_broken(error):
                raise  # another rank is gone
            wrong = str(error)  # of pickling, on all ranks
        if wrong or parts is None:
            raise JoinError(f"a rank without data cannot be told what to call the module with: {wrong}. {_HINT} [J156]")
        self.call = Call(*parts).prepared

    def arguments_of_example(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The ``(args, kwargs)`` of the user's ``example``; ``None`` without one."""
        if self.example is None:
            return None
        return self.example() if callable(self.example) else (self.example, {})

    def run(self, module: torch.nn.Module) -> Any:
        """Run ``module`` as agreed and return its output."""
        call = self.call
        assert call is not None
        dtype = call.autocast
        with torch.autocast(self._device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False):
            return module(*call.args, **call.kwargs)

    def attempt(self, module: torch.nn.Module, rank: int) -> None:
        """Run ``module`` for nothing, on all ranks, once for each kind of call.

        Raises:
            JoinError: if it cannot take the call; on all ranks.
        """
        assert self.call is not None
        if self.call.kind in self._attempted:
            return
        try:
            with torch.no_grad(), in_mode(module, training=False):
                self.run(module)
        except Exception as error:
            if is_broken(error):
                raise  # another rank is gone
            raise JoinError(self.complaint(module, error, rank)) from error
        self._attempted.append(self.call.kind)

    def takes_empty(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], rank: int) -> bool:
        """Whether ``module`` can take this call without rows: tried on all ranks, once for each kind of call."""
        kept, self.call = self.call, Call.of(args, kwargs, self._device).without_rows
        kind = self.call.kind
        try:
            if kind not in self._refused:
                self.attempt(module, rank)
        except JoinError:
            self._refused.append(kind)
        finally:
            self.call = kept
        return kind not in self._refused

    def complaint(self, module: torch.nn.Module, error: Exception, rank: int) -> str:
        """What to say of a module that cannot be run."""
        name = type(module).__name__
        with_what = "an empty batch" if self.example is None else f"example={self.example!r}"
        return (
            f"rank {rank} cannot run {name} on {with_what}, as a rank without data has to:"
            f" {described(error)}. {_HINT} [J157]"
        )


@contextmanager
def in_mode(module: torch.nn.Module, *, training: bool) -> Generator[None]:
    """Within the context, ``module`` is in training mode or in evaluation, and each part as it was afterwards."""
    if module.training == training:
        yield
        return
    with keeping_modes(module):
        module.train(training)
        yield


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _kind_of(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.dim()
    return leaf if isinstance(leaf, (bool, str)) or leaf is None else cast("type[object]", type(leaf))


def _autocast(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None

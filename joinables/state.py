"""Adapter for objects that have state but no collectives: :class:`State`.

LR schedulers, GradScalers, EMA copies: anything with ``state_dict`` and ``load_state_dict``; optimizers have an adapter
of their own, ``joinables.optimizer_state``. Nothing is sent in the loop. At the end of a block:

- Some ranks have shadowed others, so that their state is stale: all load that of the last joiner. Tensors are sent as
  flat buffers, the rest of the state dict is pickled.
- None has: the states of schedulers and scalers are compared. What matches buffers in an EMA copy is copied, because
  buffers are each rank's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from typing_extensions import override

from join import JoinError
from join.collectives._torch_private import pytree
from join.errors import described
from join.transfer import broadcast_tensors, broadcast_tree
from joinables.adapter import Silent


class Stateful(Protocol):
    """Anything with ``state_dict`` and ``load_state_dict``."""

    def state_dict(self) -> Any:
        """The state, as nested containers of tensors and picklable values."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state."""


class State(Silent):
    """Brings an object's state up to date when the block ends, on ranks that ran out early.

    Args:
        stateful: the object.
    """

    def __init__(self, stateful: Stateful) -> None:
        super().__init__(stateful)
        self._stateful = stateful

    @override
    def synchronise(self, source: int) -> None:
        state, why_not = None, ""
        if self._collective.rank == source:
            try:
                state = self._stateful.state_dict()
                why_not = unlike_others(state)
            except Exception as failure:
                why_not = f"rank {source} has no state of it: {described(failure)}"
        state, why_not = broadcast_tree(self._collective, (None if why_not else state, why_not), source)
        if why_not:
            raise_not_copied(self.join_name, why_not)
        if self._collective.rank != source:
            self._stateful.load_state_dict(state)

    @override
    def synchronise_own(self, source: int) -> None:
        stateful = self._stateful
        if isinstance(stateful, torch.nn.Module):
            own = [buffer for buffer in stateful.buffers() if is_plain(buffer)]
            broadcast_tensors(self._collective, own, source)
            return
        names = self._names_of_buffers()
        if not names or is_compared(stateful):
            return
        state = stateful.state_dict()
        matching: list[torch.Tensor] = []
        for path, leaf in flattened(state):
            name = getattr(path[-1], "key", None) if path else None
            if isinstance(leaf, torch.Tensor) and is_plain(leaf) and name in names and leaf.shape == names[name]:
                matching.append(leaf)
        if matching:
            broadcast_tensors(self._collective, matching, source)
            stateful.load_state_dict(state)  # which may have been a copy

    def _names_of_buffers(self) -> dict[str, torch.Size]:
        """The buffers of all listed modules, and of what is inside a wrapper, by name."""
        modules = [target for target in self._channel.targets if isinstance(target, torch.nn.Module)]
        inside = [getattr(module, "module", None) for module in modules]
        modules += [module for module in inside if isinstance(module, torch.nn.Module)]
        return {name: buffer.shape for module in modules for name, buffer in module.named_buffers()}

    @override
    def equal_values(self) -> Mapping[str, Any]:
        if isinstance(self._stateful, torch.nn.Module):
            return shapes_of(dict(self._stateful.named_buffers()))
        return plain_values(self._stateful.state_dict()) if is_compared(self._stateful) else {}


def is_compared(stateful: object) -> bool:
    """Whether an object has the same state on all ranks that have made the same steps: a scheduler, or a scaler."""
    return isinstance(stateful, (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler))


def shapes_of(buffers: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    """The shapes of a module's buffers, which are the same on all ranks, as values that are compared."""
    return {f"shape of buffer {name}": list(buffer.shape) for name, buffer in buffers.items()}


def flattened(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """The leaves of nested containers, each with its path."""
    return pytree.tree_flatten_with_path(tree)[0]


def plain_values(tree: Any) -> dict[str, Any]:
    """The numbers, texts and small tensors of nested containers, by path; what else there is is left out."""
    found: dict[str, Any] = {}
    for path, leaf in flattened(tree):
        value = leaf.item() if isinstance(leaf, torch.Tensor) and leaf.numel() == 1 else leaf
        if isinstance(value, (bool, int, float, complex, str)):
            found[pytree.keystr(path)] = float(value) if isinstance(value, float) else value  # numpy's are floats, too
    return found


def unlike_others(tree: Any) -> str:
    """Why tensors in ``tree`` cannot be sent as others are, if so: shards of several ranks, and other subclasses."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and not is_plain(leaf):
            return f"it holds a {type(leaf).__name__} of layout {leaf.layout}, which is not a plain tensor"
    return ""


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is dense, and of no subclass."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def raise_not_copied(name: str, why: str) -> None:
    """Raise the error, on all ranks, for state that cannot be copied to ranks that ran out of data early."""
    raise JoinError(
        f"the state of {name} cannot be copied from a rank that ran out of data last to the others: {why}; loop over"
        " join.iterate, which copies nothing [J440]"
    )

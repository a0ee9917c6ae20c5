"""How a module is trained on the ranks of a run: :class:`Strategy`, and :class:`SingleStrategy` for one process.

A strategy starts the processes, owns the wrapper around the module, if there is one, and runs backward::

    with strategy.block(...):              one epoch
        loss = module.training_step(...)
        strategy.backward(loss, ...)
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, cast

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel
from typing_extensions import override

from join import JoinReport
from join.collectives import Collective, SingleCollective


class Strategy(ABC):
    """How a module is trained on the ranks of a run; one object serves one trainer."""

    is_distributed: ClassVar[bool]
    shards_optimizers: bool = False
    report: JoinReport | None = None
    """Who did what in the last block, which is an epoch."""

    @abstractmethod
    def launch(self, world_size: int, accelerator: str, fn: Callable[..., Any], *args: Any) -> Any:
        """Run ``fn(*args)`` on all ranks and return rank 0's result."""

    @property
    @abstractmethod
    def collective(self) -> Collective:
        """The ranks of the run."""

    @abstractmethod
    def wrap(self, module: torch.nn.Module, device: torch.device, *, several_backwards: bool) -> None:
        """Wrap ``module`` for training; if it is wrapped here already, nothing happens.

        Args:
            module: the module, on ``device``.
            device: where it trains.
            several_backwards: whether a step may run several backwards, each through a part of the parameters.

        Raises:
            TypeError: if it is wrapped already, by somebody else.
        """

    def shard(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        """Return the optimizers to use in the run: ``optimizers`` themselves, or sharded ones in their place."""
        return list(optimizers)

    @abstractmethod
    def block(
        self, listed: Sequence[Any], *, enable: bool, throw: bool, transform_gradients: Callable[[], object]
    ) -> AbstractContextManager[object]:
        """Return the context of one epoch, which ranks may leave at different times.

        Args:
            listed: what is kept in step besides the module: optimizers, schedulers, anything that ``Join`` takes.
            enable: whether ranks may have different numbers of batches, or batches that weigh differently.
            throw: whether all ranks raise when the first has no more.
            transform_gradients: what the loop does to gradients between backward and step.
        """

    @abstractmethod
    def backward(self, loss: torch.Tensor, weight: float | None, *, sync: bool = True, **options: Any) -> None:
        """Add the gradients of ``loss``.

        Args:
            loss: the mean over the samples of a batch.
            weight: how many samples that are, where batches weigh differently; ``None`` if all weigh the same.
            sync: whether an optimizer step follows: gradients are then the mean over all batches since the last such
                call, on all ranks.
            **options: of ``torch.Tensor.backward``.
        """

    @abstractmethod
    def teardown(self) -> None:
        """Drop the wrapper and its buckets, and leave the module as it was."""


class SingleStrategy(Strategy):
    """Training in one process, without a wrapper."""

    is_distributed = False

    def __init__(self) -> None:
        self._collective = SingleCollective()
        self._module: torch.nn.Module | None = None
        self._window = 0.0  # the sum of the weights of the backwards since the last step

    @override
    def launch(self, world_size: int, accelerator: str, fn: Callable[..., Any], *args: Any) -> Any:
        self._collective.teardown()
        self._collective.setup(0, 1)
        return fn(*args)

    @property
    @override
    def collective(self) -> Collective:
        return self._collective

    @override
    def wrap(self, module: torch.nn.Module, device: torch.device, *, several_backwards: bool) -> None:
        check_not_wrapped(module)
        self._module, self._window = module, 0.0

    @override
    def block(
        self, listed: Sequence[Any], *, enable: bool, throw: bool, transform_gradients: Callable[[], object]
    ) -> AbstractContextManager[object]:
        self.report = JoinReport()
        return contextlib.nullcontext()

    @override
    def backward(self, loss: torch.Tensor, weight: float | None, *, sync: bool = True, **options: Any) -> None:
        assert self._module is not None
        if weight is None or (sync and not self._window):
            loss.backward(**options)
            return
        self._window += weight

        # Weights apply at the parameters, as under DDP: a loss times its weight could overflow in half precision.
        def weigh(gradient: torch.Tensor) -> torch.Tensor:
            return gradient * weight

        parameters = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        handles: list[Any] = [parameter.register_hook(weigh) for parameter in parameters]
        try:
            loss.backward(**options)
        finally:
            for handle in handles:
                handle.remove()
        if sync:
            for parameter in self._module.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(self._window)
            self._window = 0.0

    @override
    def teardown(self) -> None:
        self._module = None


def check_not_wrapped(module: torch.nn.Module) -> None:
    """Raise a ``TypeError`` for a module that is, or contains, a data-parallel wrapper."""
    for name, part in cast("Iterator[tuple[str, torch.nn.Module]]", module.named_modules()):
        if isinstance(part, (DistributedDataParallel, DataParallel)):
            where = f"contains one ({name!r})" if name else "is one"
            raise TypeError(
                f"the trainer wraps modules in DistributedDataParallel itself, and this {type(module).__name__}"
                f" {where}; pass the bare module [J263]"
            )


# -- registry ---------------------------------------------------------------------------------------------------------

_registry: dict[str, tuple[Callable[[], Strategy], str]] = {}


def register_strategy(name: str, make: Callable[[], Strategy], description: str) -> None:
    """Make ``Trainer(strategy=name)`` use ``make()``.

    Raises:
        ValueError: if the name is taken.
    """
    if name in _registry:
        raise ValueError(f"strategy {name!r} is registered already; use another name [J264]")
    _registry[name] = make, description


def strategies() -> dict[str, str]:
    """The names that ``Trainer(strategy=)`` takes, and what each stands for."""
    return {name: description for name, (_, description) in sorted(_registry.items())}


def strategy_of(strategy: str | Strategy) -> Strategy:
    """Return ``strategy``, or the one registered under that name."""
    if isinstance(strategy, Strategy):
        return strategy
    if not isinstance(strategy, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"strategy={strategy!r} must be a name or a Strategy [J265]")
    if strategy not in _registry:
        raise ValueError(f"strategy={strategy!r} is unknown; the known ones are {', '.join(strategies())} [J266]")
    return _registry[strategy][0]()


register_strategy("single", SingleStrategy, "one process, no wrapper")

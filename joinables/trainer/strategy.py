"""How a module is trained on the ranks of a run: :class:`Strategy`, alone or with DDP.

A strategy owns the wrapper around the module, and is the only one who does. The wrapper is DDP around a *gate*: a
module that holds the trained one and whose forward returns the loss it is given. The training step runs the user's
module as it is, whatever methods it calls; then the loss goes through DDP, which finds the parameters behind it, and
backward. So nothing of the user's module is replaced, and several backwards in one step are as many passes through the
gate.

    with strategy.block(...):              Join, over what is trained
        loss = module.training_step(...)   no collective
        strategy.backward(loss, ...)       ddp(loss): buffers; backward: buckets
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, cast

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel
from typing_extensions import override

from join import Join, JoinReport
from join.arguments import checked_timeout, did_you_mean
from join.collectives import Collective, SingleCollective, collective_of
from joinables.trainer.batchnorm import to_batchnorm, to_sync_batchnorm
from joinables.trainer.launch.launcher import Launcher, StartMethod, checked_start_method
from joinables.trainer.sharding import sharded


class Strategy(ABC):
    """How a module is trained; one object serves one trainer."""

    is_distributed: ClassVar[bool]
    shards_optimizers: ClassVar[bool] = False

    def __init__(self) -> None:
        self.report: JoinReport | None = None
        """The report of the last block."""

    @abstractmethod
    def launch(self, world_size: int, accelerator: str, fn: Callable[..., Any], *args: Any) -> Any:
        """Run ``fn(*args)`` on all ranks and return rank 0's result."""

    @property
    @abstractmethod
    def collective(self) -> Collective:
        """The ranks of the run."""

    @abstractmethod
    def wrap(self, module: torch.nn.Module, device: torch.device, *, several_backwards: bool) -> None:
        """Make ``module`` the one that is trained; the same module keeps its wrapper.

        Args:
            module: the module, on ``device``.
            device: where it trains.
            several_backwards: whether a step may run several backwards, each through a part of the parameters.

        Raises:
            TypeError: if it is wrapped already.
        """

    @abstractmethod
    def shard(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        """What takes the place of ``optimizers`` in the run."""

    @abstractmethod
    def block(
        self, listed: Sequence[Any], *, enable: bool, throw: bool, transform_gradients: Callable[[], object]
    ) -> AbstractContextManager[object]:
        """One epoch's block: ranks may leave it at different times.

        Args:
            listed: what is trained besides the module: optimizers, schedulers, anything that can join.
            enable: whether ranks may have different numbers of batches, or batches that weigh differently.
            throw: whether all ranks stop when the first has no more.
            transform_gradients: what the loop does between backward and step.
        """

    @abstractmethod
    def backward(self, loss: torch.Tensor, weight: float | None, *, sync: bool = True, **options: Any) -> None:
        """Add the gradients of ``loss``.

        Args:
            loss: the mean over the samples of a batch.
            weight: how many samples that are, where batches weigh differently; ``None`` if all weigh the same.
            sync: whether this ends a window: gradients are then the mean over all of its batches on all ranks.
            **options: of ``torch.Tensor.backward``.
        """

    @abstractmethod
    def teardown(self) -> None:
        """Drop the wrapper and its buckets; the module is as it was."""


class SingleStrategy(Strategy):
    """One process, without a wrapper."""

    is_distributed = False

    def __init__(self) -> None:
        super().__init__()
        self._collective = SingleCollective()
        self._module: torch.nn.Module | None = None
        self._window = 0.0

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
    def shard(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        return list(optimizers)

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

        # At the parameters, as under DDP: a loss times its weight could overflow in half precision.
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


class DDPStrategy(Strategy):
    """One process a rank, with ``DistributedDataParallel``.

    Args:
        start_method: how processes are started, where nobody else starts them.
        find_unused_parameters: as in DDP; ``None`` is ``False``, but ``True`` under manual optimization, where each
            backward reaches some of the parameters only. torch then notes on stderr, once, that one reached them all:
            give ``False`` if all do.
        shard_optimizers: whether optimizers become ``ZeroRedundancyOptimizer``.
        sync_batchnorm: whether BatchNorm layers are SyncBatchNorm while they train; needs GPUs.
        ddp_comm_state: first argument of ``ddp_comm_hook``.
        ddp_comm_hook: communication hook of the gradients.
        ddp_comm_wrapper: wraps the hook, as ``fp16_compress_wrapper`` does.
        timeout: seconds that a joined or waiting rank gives the others, as in ``Join``.
        **ddp_kwargs: other arguments of ``DistributedDataParallel``.

    Raises:
        TypeError: for an argument that neither has, or that the strategy gives to ``DistributedDataParallel`` itself.
        ValueError: for an unknown ``start_method``, a ``timeout`` that is none, or a wrapper without a hook.
    """

    is_distributed = True

    def __init__(
        self,
        start_method: StartMethod = "spawn",
        *,
        find_unused_parameters: bool | None = None,
        shard_optimizers: bool = False,
        sync_batchnorm: bool = False,
        ddp_comm_state: object = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        timeout: float | None = None,
        **ddp_kwargs: Any,
    ) -> None:
        super().__init__()
        if ddp_comm_wrapper is not None and ddp_comm_hook is None:
            raise ValueError("ddp_comm_wrapper wraps ddp_comm_hook, which is not given")
        _check_ddp_kwargs(ddp_kwargs)
        self.start_method: StartMethod = checked_start_method(start_method)
        self.sync_batchnorm = sync_batchnorm
        self.shards_optimizers = shard_optimizers  # pyright: ignore[reportAttributeAccessIssue]
        self._find_unused = find_unused_parameters
        self._hook = (ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper)
        self._timeout = checked_timeout(timeout)
        self._ddp_kwargs = ddp_kwargs
        self._ddp: DistributedDataParallel | None = None
        self._wrapped: tuple[Any, ...] = ()
        self._join: Join | None = None

    def with_sync_batchnorm(self) -> DDPStrategy:
        """Return a copy whose BatchNorm layers are SyncBatchNorm while they train."""
        changed = copy.copy(self)
        changed.sync_batchnorm = True
        return changed

    @override
    def launch(self, world_size: int, accelerator: str, fn: Callable[..., Any], *args: Any) -> Any:
        backend = "cpu:gloo,cuda:nccl" if accelerator == "cuda" else "gloo"
        return Launcher(world_size, start_method=self.start_method, backend=backend).launch(fn, *args)

    @property
    @override
    def collective(self) -> Collective:
        return collective_of(None)

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The wrapper, while there is one."""
        return self._ddp

    @override
    def wrap(self, module: torch.nn.Module, device: torch.device, *, several_backwards: bool) -> None:
        check_not_wrapped(module)
        if self.sync_batchnorm:
            to_sync_batchnorm(module)
        key = (id(module), id(torch.distributed.group.WORLD), *((id(p), p.requires_grad) for p in module.parameters()))
        if self._ddp is not None and key == self._wrapped:
            return
        self.teardown()
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ValueError(f"{type(module).__name__} has no parameter that requires a gradient, so nothing to train")
        find_unused = several_backwards if self._find_unused is None else self._find_unused
        self._ddp = DistributedDataParallel(
            _Gate(module),
            device_ids=None if device.type == "cpu" else [device],
            find_unused_parameters=find_unused,
            **self._ddp_kwargs,
        )
        state, hook, wrapper = self._hook
        if hook is not None:
            self._ddp.register_comm_hook(state, wrapper(hook) if wrapper is not None else hook)
        self._wrapped = key

    @override
    def shard(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        return [sharded(each) for each in optimizers] if self.shards_optimizers else list(optimizers)

    @override
    @contextlib.contextmanager
    def block(
        self, listed: Sequence[Any], *, enable: bool, throw: bool, transform_gradients: Callable[[], object]
    ) -> Generator[None]:
        def joining(each: Any) -> Any:
            if not (self.shards_optimizers and isinstance(each, torch.optim.Optimizer)):
                return each
            from joinables.zero import ZeroStep

            return ZeroStep(cast("Any", each), transform_gradients)

        join = Join(
            [self._ddp, *map(joining, listed)],
            enable=enable,
            throw_on_early_termination=throw,
            timeout=self._timeout,
            divide_by_initial_world_size=False,
        )
        self._join = join if enable else None
        try:
            with join:
                yield
            self.report = join.report
        finally:
            self._join = None

    @override
    def backward(self, loss: torch.Tensor, weight: float | None, *, sync: bool = True, **options: Any) -> None:
        assert self._ddp is not None
        if self._join is not None:
            self._join.weight = weight
        with contextlib.nullcontext() if sync else self._ddp.no_sync():
            self._ddp(loss).backward(**options)

    @override
    def teardown(self) -> None:
        if self._ddp is not None and self.sync_batchnorm:
            to_batchnorm(cast("_Gate", self._ddp.module).trained)
        self._ddp, self._wrapped = None, ()


_GIVEN = {"module", "device_ids", "output_device", "dim", "process_group"}


def _check_ddp_kwargs(options: Mapping[str, Any]) -> None:
    known = inspect.signature(DistributedDataParallel).parameters.keys() - _GIVEN
    for name, value in options.items():
        if name in _GIVEN:
            raise TypeError(f"{name}={value!r}: the strategy gives {name} to DistributedDataParallel itself")
        if name not in known:
            own = inspect.signature(DDPStrategy).parameters.keys() - {"ddp_kwargs"}
            raise TypeError(
                f"{name}={value!r}: neither DDPStrategy nor DistributedDataParallel takes this argument"
                f"{did_you_mean(name, sorted(known | own))}"
            )


class _Gate(torch.nn.Module):
    """Holds what is trained; what goes through it comes out as it is."""

    forward_is_over = True  # of what is trained: its buffers are new when this one's forward begins

    def __init__(self, trained: torch.nn.Module) -> None:
        super().__init__()
        self.trained = trained

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        return loss


def check_not_wrapped(module: torch.nn.Module) -> None:
    """Raise a ``TypeError`` for a module that is, or contains, a data-parallel wrapper."""
    for name, part in cast("Iterator[tuple[str, torch.nn.Module]]", module.named_modules()):
        if isinstance(part, (DistributedDataParallel, DataParallel)):
            where = f"contains one ({name!r})" if name else "is one"
            raise TypeError(
                f"the trainer wraps modules in DistributedDataParallel itself, and this {type(module).__name__}"
                f" {where}; pass the bare module"
            )


# -- registry ---------------------------------------------------------------------------------------------------------

_registry: dict[str, tuple[Callable[[], Strategy], str]] = {}


def register_strategy(name: str, make: Callable[[], Strategy], description: str) -> None:
    """Make ``Trainer(strategy=name)`` use ``make()``.

    Raises:
        ValueError: if the name is taken.
    """
    if name in _registry:
        raise ValueError(f"strategy {name!r} is registered already; use another name")
    _registry[name] = make, description


def strategies() -> dict[str, str]:
    """The registered names, and what each stands for."""
    return {name: description for name, (_, description) in sorted(_registry.items())}


def strategy_of(strategy: str | Strategy) -> Strategy:
    """Return ``strategy``, or the one registered under that name.

    Raises:
        ValueError: for an unknown name.
        TypeError: for something else.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if not isinstance(strategy, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"strategy={strategy!r} must be a name or a Strategy")
    if strategy not in _registry:
        raise ValueError(f"strategy={strategy!r} is unknown; the known ones are {', '.join(strategies())}")
    return _registry[strategy][0]()


def _register(name: str, description: str, start_method: StartMethod = "spawn", **options: Any) -> None:
    register_strategy(name, lambda: DDPStrategy(start_method, **options), description)


register_strategy("single", SingleStrategy, "one process, no wrapper")
_register("ddp", "DDP; processes are spawned, unless a launcher has started them")
_register("ddp_spawn", "the same as ddp")
_register("ddp_fork", "DDP in forked processes: in notebooks, before anything was computed", "fork")
_register("ddp_forkserver", "DDP in processes that a server forks", "forkserver")
_register(
    "ddp_zero",
    "DDP with ZeroRedundancyOptimizer: each rank keeps a part of the optimizer's state",
    shard_optimizers=True,
)
for _name in ("ddp", "ddp_spawn"):
    for _value in (False, True):
        _register(
            f"{_name}_find_unused_parameters_{str(_value).lower()}",
            f"{_name} with find_unused_parameters={_value}",
            find_unused_parameters=_value,
        )

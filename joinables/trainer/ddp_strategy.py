"""Training with DDP, one process a rank: :class:`DDPStrategy`.

The wrapper is DDP around a :class:`joinables.LossGate`, whose forward returns the loss that it is given.
The training step runs the user's module as it is, whatever methods it calls; then the loss goes through DDP, which
finds the parameters behind it, and backward. So nothing of the user's module is replaced, and several backwards in one
step are as many passes through the gate::

    with strategy.block(...):              Join, over what is trained
        loss = module.training_step(...)   no collective
        strategy.backward(loss, ...)       ddp(loss): buffers; backward: buckets of gradients
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from join import Join
from join.arguments import checked_timeout, did_you_mean
from join.collectives import Collective, collective_of
from joinables.loss_gate import LossGate
from joinables.trainer.launch import Launcher, StartMethod
from joinables.trainer.strategy import Strategy, check_not_wrapped, register_strategy

if TYPE_CHECKING:
    from joinables.zero import ZeroRedundancyOptimizer


class DDPStrategy(Strategy):
    """Training with ``DistributedDataParallel``, one process a rank.

    Args:
        start_method: how processes are started, where nobody else starts them.
        find_unused_parameters: as in DDP; ``None`` is ``False``, but ``True`` under manual optimization, where a
            backward may reach a part of the parameters only. If all backwards reach all of them, torch says so on
            stderr: then give ``False``.
        shard_optimizers: whether optimizers become ``ZeroRedundancyOptimizer``.
        sync_batchnorm: whether BatchNorm layers are SyncBatchNorm while they train; needs GPUs.
        ddp_comm_state: first argument of ``ddp_comm_hook``.
        ddp_comm_hook: communication hook of the gradients.
        ddp_comm_wrapper: wraps the hook, as ``fp16_compress_wrapper`` does.
        timeout: seconds that a joined or waiting rank gives the others, as in ``Join``.
        **ddp_kwargs: other arguments of ``DistributedDataParallel``.

    Raises:
        TypeError: for an argument that neither this class nor ``DistributedDataParallel`` takes, or that the strategy
            gives to it itself.
        ValueError: for a ``timeout`` that is none, or a wrapper without a hook.
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
        if ddp_comm_wrapper is not None and ddp_comm_hook is None:
            raise ValueError("ddp_comm_wrapper wraps ddp_comm_hook, which is not given; give both or neither [J204]")
        _check_ddp_kwargs(ddp_kwargs)
        self.start_method: StartMethod = start_method
        self.sync_batchnorm = sync_batchnorm
        self.shards_optimizers = shard_optimizers
        self._find_unused = find_unused_parameters
        self._hook = (ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper)
        self._timeout = checked_timeout(timeout)
        self._ddp_kwargs = ddp_kwargs
        self.ddp: DistributedDataParallel | None = None
        """The wrapper, while there is one."""
        self._wrapped: tuple[Any, ...] = ()  # what the wrapper was made for
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

    @override
    def wrap(self, module: torch.nn.Module, device: torch.device, *, several_backwards: bool) -> None:
        check_not_wrapped(module)
        if self.sync_batchnorm:
            to_sync_batchnorm(module)
        key = (id(module), id(torch.distributed.group.WORLD), *((id(p), p.requires_grad) for p in module.parameters()))
        if key == self._wrapped:
            return
        self.teardown()
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ValueError(
                f"{type(module).__name__} has no parameter that requires a gradient, so nothing to train; unfreeze some"
                " [J205]"
            )
        find_unused = several_backwards if self._find_unused is None else self._find_unused
        self.ddp = DistributedDataParallel(
            LossGate(module),
            device_ids=None if device.type == "cpu" else [device],
            find_unused_parameters=find_unused,
            **self._ddp_kwargs,
        )
        state, hook, wrapper = self._hook
        if hook is not None:
            self.ddp.register_comm_hook(state, wrapper(hook) if wrapper is not None else hook)
        self._wrapped = key

    @override
    def shard(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        return [sharded(each) for each in optimizers] if self.shards_optimizers else list(optimizers)

    @override
    @contextlib.contextmanager
    def block(
        self, listed: Sequence[Any], *, enable: bool, throw: bool, transform_gradients: Callable[[], object]
    ) -> Generator[None]:
        if self.shards_optimizers:
            from joinables.zero import ZeroRedundancyOptimizer, ZeroStep

            listed = [
                ZeroStep(each, transform_gradients) if isinstance(each, ZeroRedundancyOptimizer) else each
                for each in listed
            ]
        join = Join(
            [self.ddp, *listed],
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
        assert self.ddp is not None
        if self._join is not None:
            self._join.weight = weight
        with contextlib.nullcontext() if sync else self.ddp.no_sync():
            self.ddp(loss).backward(**options)

    @override
    def teardown(self) -> None:
        if self.ddp is not None and self.sync_batchnorm:
            to_batchnorm(cast("LossGate", self.ddp.module).trained)
        self.ddp, self._wrapped = None, ()


_GIVEN = {"module", "device_ids", "output_device", "dim", "process_group"}


def _check_ddp_kwargs(options: Mapping[str, Any]) -> None:
    known = inspect.signature(DistributedDataParallel).parameters.keys() - _GIVEN
    for name, value in options.items():
        if name in _GIVEN:
            raise TypeError(
                f"{name}={value!r}: the strategy gives {name} to DistributedDataParallel itself; leave it out [J206]"
            )
        if name not in known:
            own = inspect.signature(DDPStrategy).parameters.keys() - {"ddp_kwargs"}
            raise TypeError(
                f"{name}={value!r}: neither DDPStrategy nor DistributedDataParallel takes this argument; leave it out"
                f"{did_you_mean(name, sorted(known | own))} [J207]"
            )


# -- what becomes of layers and optimizers ----------------------------------------------------------------------------

_KINDS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)


def to_sync_batchnorm(module: torch.nn.Module) -> None:
    """Make every BatchNorm layer synchronise its statistics over the default process group."""
    for layer in module.modules():
        kind = type(layer)
        if kind in _KINDS:
            vars(layer).update(_was=kind, process_group=torch.distributed.group.WORLD)
            layer.__class__ = torch.nn.SyncBatchNorm


def to_batchnorm(module: torch.nn.Module) -> None:
    """Undo :func:`to_sync_batchnorm`; layers that were SyncBatchNorm before stay so."""
    for layer in module.modules():
        kind = vars(layer).get("_was")
        if kind is not None:
            layer.__class__ = kind
            del layer._was, layer.process_group


def sharded(optimizer: torch.optim.Optimizer) -> ZeroRedundancyOptimizer:
    """Return a ``ZeroRedundancyOptimizer`` of the same kind and groups as ``optimizer``, which has no state yet."""
    from joinables.zero import ZeroRedundancyOptimizer  # it takes a second to import; most programs never need it

    options = {name: value for name, value in optimizer.defaults.items() if name != "differentiable"}
    groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    try:
        zero = ZeroRedundancyOptimizer(groups[0]["params"], type(optimizer), **options)
    except TypeError as error:
        raise TypeError(
            f"{type(optimizer).__name__} cannot be sharded: ZeroRedundancyOptimizer builds it from parameters and"
            f" {sorted(options)}, which failed: {error}; build a ZeroRedundancyOptimizer yourself, or do not shard it"
            " [J208]"
        ) from error
    zero.param_groups[0].update({name: value for name, value in groups[0].items() if name != "params"})
    for group in groups[1:]:
        zero.add_param_group(group)
    return zero


# -- names ------------------------------------------------------------------------------------------------------------


def _register(name: str, description: str, start_method: StartMethod = "spawn", **options: Any) -> None:
    register_strategy(name, lambda: DDPStrategy(start_method, **options), description)


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

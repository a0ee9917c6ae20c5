"""Training of a module on the ranks of a run: :class:`Strategy` for one process, :class:`DDPStrategy` for several.

A strategy starts the processes, makes the collective that connects them, owns the wrapper around the module, if there
is one, and runs backward.

The wrapper of :class:`DDPStrategy` is DDP around a :class:`joinables.LossGate`, whose forward returns its argument, the
loss. The training step runs the user's module as it is, and may call any of its methods. Then the loss passes through
DDP, which finds the parameters that it depends on, and backward follows. So no part of the user's module is replaced,
and a step with several backwards passes the gate once for each of them::

    with strategy.block(...):              one epoch: Join, over what is trained
        loss = module.training_step(...)   no collective
        strategy.backward(loss, ...)       ddp(loss): buffers; backward: buckets of gradients
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast, get_args

import torch
import torch.distributed as dist
from torch.nn.parallel import DataParallel, DistributedDataParallel
from typing_extensions import override

from join import Join, JoinReport
from join.collectives import Collective, SingleCollective, collective_of
from join.collectives._torch_private import thawed
from join.collectives.base import describe
from joinables._torch import reducer
from joinables._torch.objects import mark_stepped
from joinables.loss_gate import LossGate, leaves_of
from joinables.modules import replaced
from joinables.trainer.arguments import REST, check_choice
from joinables.trainer.launch import (
    Launcher,
    Place,
    StartMethod,
    launcher_of,
    node_of,
    place_of,
)
from joinables.trainer.metrics import Reduction

if TYPE_CHECKING:
    from joinables.zero import ZeroRedundancyOptimizer


class Strategy:
    """Training on the ranks of a run; this base class trains in a single process, without a wrapper.

    One object serves one trainer. To train over ranks that you connect yourself, derive from this class, and return a
    collective from ``make_collective``. To add to torch's, derive from :class:`DDPStrategy`, and return
    ``collective_of(Mine(torch.distributed.group.WORLD))``, where ``Mine`` derives from ``TorchCollective``.

    If there are several ranks, the whole run is one ``Join`` block, with a block for each epoch in it. So whatever a
    rank does when another one fails, it raises an error that names the cause, and long waits are explained.
    """

    collective: Collective
    """Ranks of the current run, from ``setup`` to ``teardown``."""
    is_distributed: ClassVar[bool] = False
    shards_optimizers: bool = False
    report: JoinReport | None = None
    """Report on the ranks in the last block, which is an epoch."""
    timeout: float | None = None
    """Seconds that a rank waits for the others in a run; ``None`` for no limit."""

    def __init__(self) -> None:
        self._module = torch.nn.Module()  # the module that is trained
        self._unit = self._window = 0.0  # the window's first weight, and the sum of its weights divided by the first
        self._whole: Join | None = None  # the block of the run

    def place(self, world_size: int) -> Place | None:
        """Return the place of this process in a run, if all processes of the run exist already.

        Args:
            world_size: The number of processes that the user wants.
        """
        return None

    def launch(self, fn: Callable[..., Any], *args: Any, world_size: int, **how: Any) -> Any:
        """Run ``fn(*args)`` on all ranks, and return the result of rank 0.

        Args:
            fn: The function.
            *args: Its arguments. The class ``Place`` among them becomes the :class:`Place` of the rank.
            world_size: The number of ranks.
            **how: ``num_nodes``, and the type of device ``accelerator``.
        """
        place = self.place(world_size) or Place(0, 1, 0)
        return fn(*(place if arg is Place else arg for arg in args))

    def device(self, accelerator: str, place: Place) -> torch.device:
        """Return the device on which a process computes; ``accelerator`` is its type."""
        if accelerator == "cpu":
            return torch.device("cpu")
        # Some launchers let each process see only its own GPU.
        device = torch.device(accelerator, place.local_rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device)
        return device

    def make_collective(self) -> Collective:
        """Return the collective of the ranks, which ``setup`` connects."""
        return SingleCollective()

    def setup(self, rank: int, world_size: int) -> None:
        """Make and set up ``collective``; called first in a run, on all ranks."""
        self.collective = self.make_collective()
        self.collective.setup(rank, world_size)

    def check(self, *, several_backwards: bool) -> None:
        """Raise an error if this strategy cannot train so, before anything is sent; called on all ranks.

        Args:
            several_backwards: Whether a step may run several backwards.
        """

    # The block of a run.

    def open(self, joinables: Sequence[Any]) -> None:
        """Enter the block of a run, which lists the objects that are in none of its other blocks."""
        if self.is_distributed:
            self._whole = Join(joinables, timeout=self.timeout).open()

    def close(self, error: BaseException | None = None) -> None:
        """Leave the block of a run with all ranks, or with an error, which the others then raise, too.

        Raises:
            PeerError: If another rank caused the error.
        """
        whole, self._whole = self._whole, None
        if whole is not None:
            whole.close(error)

    def meet(self, doing: str, vote: bool = True) -> bool:
        """Wait until all ranks of the run do the same, and return whether all pass ``vote=True``.

        Raises:
            ProtocolError: If another rank does something else.
        """
        return vote if self._whole is None else self._whole.channel.meet(doing, vote=vote)

    def moves(self) -> None:
        """Note that this rank makes progress without telling the other ranks."""
        if self._whole is not None:
            self._whole.channel.moved += 1

    def wrap(self, module: torch.nn.Module, device: torch.device, *, several_backwards: bool, held: Any = ()) -> None:
        """Wrap ``module`` for training; if this strategy has wrapped it already, for the same parameters, do nothing.

        Args:
            module: The module, on ``device``.
            device: The device on which the module trains.
            several_backwards: Whether a step may run several backwards, each through a part of the parameters.
            held: The parameters of the optimizers. If a backward may reach a part of the parameters only, these may be
                frozen and unfrozen at any time.

        Raises:
            TypeError: If the module contains a data-parallel wrapper.
        """
        if any(isinstance(part, (DistributedDataParallel, DataParallel)) for part in module.modules()):
            raise TypeError(f"{type(module).__name__} contains a data-parallel wrapper. Pass the bare module. [J263]")
        self._module, self._window = module, 0.0

    def shard(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        """Return the optimizers for the run: ``optimizers`` themselves, or sharded ones that replace them."""
        return [sharded(optimizer) for optimizer in optimizers] if self.shards_optimizers else list(optimizers)

    def block(self, listed: Sequence[Any], *, enable: bool) -> AbstractContextManager[object]:
        """Return the context of one epoch, which ranks may leave at different times.

        Args:
            listed: The objects to synchronise besides the module: optimizers, schedulers, all that ``Join`` accepts.
            enable: Whether ranks may have different numbers of batches, or batches with different weights.
        """
        self.report = JoinReport()
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor, weight: float | None, *, sync: bool = True, **options: Any) -> None:
        """Add the gradients of ``loss``.

        Args:
            loss: The mean over the samples of a batch.
            weight: The weight of the batch, in proportion to its number of samples, if batches weigh differently;
                ``None`` if all weigh the same.
            sync: Whether an optimizer step follows. Gradients are then the mean over all batches since the last such
                call, on all ranks.
            **options: Options of ``torch.Tensor.backward``.
        """
        if weight is None or (weight and sync and not self._window):
            loss.backward(**options)
            return
        # The division by a weight of the window keeps gradients at their usual size, which half precision can hold.
        self._unit = self._unit if self._window else weight or 1.0
        self._window += weight / self._unit
        (loss * (weight / self._unit)).backward(**options)
        if sync:
            for parameter in self._module.parameters():
                if parameter.grad is not None and self._window:  # otherwise no batch weighs anything
                    parameter.grad.div_(self._window)
            self._window = 0.0

    # Wrappers of collectives, which all ranks call at the same point of a run, with the same arguments. They are
    # Lightning's. If some ranks of the run call nothing or something else, all raise a ProtocolError.

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.meet("waits at a barrier")
        self.collective.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank ``src``, which is anything that pickle supports."""
        self.meet(f"broadcasts an object of rank {src}")
        return self.collective.broadcast_object(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks pass ``True``, or, with ``all=False``, whether any does."""
        self.meet(f"votes whether {'all decide' if all else 'any decides'} so")
        return self.collective.reduce_boolean_decision(decision, all=all)

    def all_gather(self, tensor: torch.Tensor | float, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Return the tensors of all ranks, without grad, as a tensor of shape ``(ranks, *tensor.shape)``."""
        own, collective = self._own("gathers", tensor, group)
        stacked = own.new_empty((collective.world_size, *own.shape))
        collective.finish(collective.all_gather(own, stacked.unbind()), on_cpu=own.is_cpu)
        return stacked

    def reduce(
        self, tensor: torch.Tensor | float, group: dist.ProcessGroup | None = None, reduce_op: Reduction = "mean"
    ) -> Any:
        """Return the reduction over all ranks, without grad; ``tensor`` itself stays as it is.

        All ranks have the same weight, whatever their numbers of samples. ``TrainModule.log`` weighs values by samples.

        Args:
            tensor: A tensor of the same shape and dtype on all ranks, or a number.
            group: The ranks, which all call this; by default all ranks of the run.
            reduce_op: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``. Means of integers have torch's default dtype.

        Returns:
            A tensor of the shape of ``tensor``, or a number if ``tensor`` is one.

        Raises:
            ValueError: If ``reduce_op`` is unknown. Nothing is sent.
        """
        check_choice("reduce_op", reduce_op, get_args(Reduction))
        own, collective = self._own(f"reduces by {reduce_op!r}", tensor, group)
        total = own.clone(memory_format=torch.contiguous_format)
        work = collective.all_reduce(total, "sum" if reduce_op == "mean" else reduce_op)
        collective.finish(work, on_cpu=total.is_cpu)
        total = total / collective.world_size if reduce_op == "mean" else total
        return total if isinstance(tensor, torch.Tensor) else total.item()

    def _own(self, call: str, value: Any, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, Collective]:
        """Return ``value`` as a tensor, and the ranks, once all ranks of a run make the call with the same shape."""
        tensor = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value, device="cpu")
        if group is not None:
            return tensor, collective_of(group)
        self.meet(f"{call} {describe(tensor.dtype, tensor.shape)} on {tensor.device.type}")
        return tensor, self.collective

    def teardown(self) -> None:
        """Take down ``collective``, and drop the wrapper and its buckets, if there are any.

        It is called last in a run, on all ranks, even if the run raised. The other ranks may be gone then, so it must
        not wait for them.
        """
        self._module, self._window = torch.nn.Module(), 0.0
        self.collective.teardown()
        del self.collective

    def state_dict(self) -> dict[str, bool]:
        """Return whether each parameter requires grad, for ranks that were out of data when a step changed that."""
        return {name: parameter.requires_grad for name, parameter in self._module.named_parameters()}

    def load_state_dict(self, state: Mapping[str, bool]) -> None:
        """Freeze and unfreeze parameters as on another rank."""
        for name, parameter in self._module.named_parameters():
            parameter.requires_grad_(state[name])


class DDPStrategy(Strategy):
    """Training with ``DistributedDataParallel``, one process for each rank.

    Args:
        start_method: How processes are started, if no launcher has started them.
        sync_batchnorm: Whether BatchNorm layers use the samples of all ranks in a fit, as ``torch.nn.SyncBatchNorm``,
            which needs GPUs. Afterwards, the module has its own layers again. All ranks have the same number of
            batches then.
        find_unused_parameters: As in DDP. ``None`` is ``False``, but ``True`` under manual optimization, where a
            backward may reach only a part of the parameters. If all backwards reach all of them, torch reports that on
            stderr; then pass ``False``. With ``False``, parameters may be frozen and unfrozen between epochs only.
        shard_optimizers: Whether optimizers become ``ZeroRedundancyOptimizer``.
        ddp_comm_state: The first argument of ``ddp_comm_hook``.
        ddp_comm_hook: The communication hook of the gradients.
        ddp_comm_wrapper: A wrapper of the hook, such as ``fp16_compress_wrapper``.
        timeout: Seconds that a rank waits for the others in a run, as in ``Join``: in an epoch, and at the end of an
            evaluation. With a timeout, every rank waits for the others before each backward, whether the data are even
            or not.
        cluster_environment: The launcher that has started the processes, such as SLURM or MPI, if it is not torchrun: a
            cluster environment of Lightning, or an object with the methods ``global_rank()``, ``world_size()`` and
            ``local_rank()``, which return numbers from 0 on, and the properties ``main_address`` and ``main_port``,
            with a host and a free port of rank 0. Then torchrun's environment variables are not read.
        **ddp_kwargs: Other arguments of ``DistributedDataParallel``.
    """

    is_distributed = True

    def __init__(
        self,
        start_method: StartMethod = "spawn",
        *,
        sync_batchnorm: bool = False,
        find_unused_parameters: bool | None = None,
        shard_optimizers: bool = False,
        ddp_comm_state: object = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        timeout: float | None = None,
        cluster_environment: Any = None,
        **ddp_kwargs: Any,
    ) -> None:
        super().__init__()
        if cluster_environment is not None:
            place_of(cluster_environment, address=True)
        self._environment = cluster_environment
        self.start_method: StartMethod = start_method
        self.shards_optimizers = shard_optimizers
        self._find_unused, self._finds_unused = find_unused_parameters, False
        self.sync_batchnorm = sync_batchnorm
        self._converted: list[tuple[torch.nn.Module, str, torch.nn.Module]] = []  # owners, names and former layers
        self._hook = (ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper)
        self.timeout, self._ddp_kwargs = timeout, ddp_kwargs
        self.ddp: DistributedDataParallel | None = None
        """The wrapper; ``None`` while the module is not wrapped."""
        self._wrapped: tuple[Any, ...] = ()  # the process group and the parameters that the wrapper was made for
        self._join: Join | None = None

    @override
    def place(self, world_size: int) -> Place | None:
        environment = launcher_of(world_size, self._environment)
        return None if environment is None else place_of(environment)

    @override
    def launch(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world_size: int,
        num_nodes: int = 1,
        accelerator: str = "cpu",
        **how: Any,
    ) -> Any:
        backend = "gloo"
        if accelerator != "cpu":
            backend = f"cpu:gloo,{accelerator}:{dist.get_default_backend_for_device(accelerator)}"
        node = node_of(world_size // num_nodes, num_nodes, os.environ) if num_nodes > 1 else None
        options: dict[str, Any] = {"start_method": self.start_method, "environment": self._environment, "node": node}
        return Launcher(world_size, backend=backend, **options).launch(fn, *args)

    @override
    def make_collective(self) -> Collective:
        return collective_of(None)

    @override
    def wrap(self, module: torch.nn.Module, device: torch.device, *, several_backwards: bool, held: Any = ()) -> None:
        super().wrap(module, device, several_backwards=several_backwards)
        if self.sync_batchnorm:
            self._convert(module)
        # A reducer reduces the parameters that require grad when it is made. In each backward it waits for all of them,
        # or it finds the unused ones. Only in the latter case may it have parameters that are frozen at times: those of
        # the optimizers, and all that it has had before.
        finds_unused = several_backwards if self._find_unused is None else self._find_unused
        self._finds_unused = finds_unused
        kept = {*map(id, held), *(part[0] for part in self._wrapped[1:] if part[-1])} if finds_unused else set[int]()
        each = ((id(p), p.dtype, p.device, p.requires_grad or id(p) in kept) for p in module.parameters())
        key = (id(dist.group.WORLD), *each)
        if self.meet("wraps the module", key == self._wrapped):
            return
        self.ddp = None  # its buckets are freed before others are made
        with thawed([parameter for parameter in module.parameters() if id(parameter) in kept]):
            self.ddp = DistributedDataParallel(
                LossGate(module),
                device_ids=None if device.type == "cpu" else [device],
                find_unused_parameters=finds_unused,
                **self._ddp_kwargs,
            )
        state, hook, wrapper = self._hook
        if hook is not None:
            self.ddp.register_comm_hook(state, wrapper(hook) if wrapper is not None else hook)
        self._wrapped = key

    @override
    @contextlib.contextmanager
    def block(self, listed: Sequence[Any], *, enable: bool) -> Generator[None]:
        if self.shards_optimizers:
            from joinables.zero import ZeroRedundancyOptimizer, ZeroStep

            # Hooks of the optimizer change gradients on all ranks, so these are not compared.
            listed = [
                ZeroStep(each, lambda: None) if isinstance(each, ZeroRedundancyOptimizer) else each for each in listed
            ]
        assert self.ddp is not None
        if self.sync_batchnorm:  # whose messages no rank could shadow: all ranks have equally many batches
            self.report = JoinReport()
            yield
            return
        known = set(map(id, reducer.parameters(self.ddp)))
        join = Join(
            [self.ddp, *listed, self],
            enable=enable,
            timeout=self.timeout,
            divide_by_initial_world_size=False,
        )
        with replaced(self, "_join", join if enable else None), join:
            yield
            named = self._module.named_parameters()
            LossGate.refuse(name for name, p in named if p.grad is not None and id(p) not in known)
        self.report = join.report

    @override
    def backward(self, loss: torch.Tensor, weight: float | None, *, sync: bool = True, **options: Any) -> None:
        assert self.ddp is not None
        if self._join is not None:
            self._join.weight = weight
        try:
            with contextlib.nullcontext() if sync else self.ddp.no_sync():
                gated = self.ddp(loss)
                if self.sync_batchnorm and weight is not None:
                    gated, self._window = gated * weight, self._window + weight
                (gated if self._join is None else self._join.scale(gated)).backward(**options)
            if sync and self.sync_batchnorm and weight is not None:
                self._divide()
            if sync and not self._finds_unused and not reducer.has_finished(self.ddp):
                self._refuse_unused({p for p in self._module.parameters() if p.grad is not None}, None)
        except RuntimeError as error:
            if "J473" in str(error):
                self._refuse_unused(leaves_of(loss), error)
            raise

    def _divide(self) -> None:
        """Make means over all samples of means over ranks, in a step whose batches have weights."""
        total = torch.tensor(self._window, dtype=torch.float64, device="cpu")
        self.collective.finish(self.collective.all_reduce(total))
        for parameter in self._module.parameters():
            if parameter.grad is not None and total:
                parameter.grad.mul_(self.collective.world_size / total.item())
        self._window = 0.0

    def _refuse_unused(self, used: Set[torch.Tensor], error: RuntimeError | None) -> NoReturn:
        """Raise an error that names the parameters that a loss has not reached."""
        assert self.ddp is not None
        expected = set(reducer.reduced_parameters(self.ddp)) - used
        unused = [name for name, parameter in self._module.named_parameters() if parameter in expected]
        #: If other steps than the one that raised do not reach a parameter, the error has no names.
        raise RuntimeError(
            f"The loss of a training step does not reach parameters of {type(self._module).__name__}"
            f" ({', '.join(unused) or 'others in each step'}), so their gradients are never ready to be averaged. Pass"
            " strategy='ddp_find_unused_parameters_true' to the Trainer, or DDPStrategy(find_unused_parameters=True)"
            " with your other options. If these parameters are not to be trained, freeze them in __init__ by"
            " requires_grad_(False). [J640]"
        ) from error

    def _convert(self, module: torch.nn.Module) -> None:
        """Replace the BatchNorm layers of a module by layers that use the samples of all ranks."""
        for owner in list(module.modules()):
            for name, layer in owner.named_children():
                if isinstance(layer, (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)):
                    setattr(owner, name, cast("Any", torch.nn.SyncBatchNorm).convert_sync_batchnorm(layer))
                    self._converted.append((owner, name, layer))

    @override
    def teardown(self) -> None:
        for owner, name, layer in self._converted:
            synced = getattr(owner, name)
            for part, tensor in (*synced.named_parameters(), *synced.named_buffers()):  # which may be on another device
                setattr(layer, part, tensor)
            setattr(owner, name, layer.train(synced.training))
        self._converted = []
        super().teardown()
        self.ddp, self._wrapped = None, ()


def sharded(optimizer: torch.optim.Optimizer) -> ZeroRedundancyOptimizer:
    """Return a ``ZeroRedundancyOptimizer`` with the class and the groups of ``optimizer``, which has no state yet.

    Schedulers of ``optimizer`` work on the groups of the result from here on.
    """
    from joinables.zero import ZeroRedundancyOptimizer  # its import takes a second, and most programs never need it

    only_in_groups = ("differentiable", "decoupled_weight_decay")  # AdamW does not accept the latter as an argument
    options = {name: value for name, value in optimizer.defaults.items() if name not in only_in_groups}
    groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    zero = ZeroRedundancyOptimizer(groups, type(optimizer), **options)

    def share_groups(_: object = None) -> None:
        optimizer.param_groups = zero.param_groups

    share_groups()
    zero.register_load_state_dict_post_hook(share_groups)
    mark_stepped(optimizer)  # it never steps itself, and schedulers would warn of that
    return zero


# -- names ------------------------------------------------------------------------------------------------------------

_zero = partial(DDPStrategy, shard_optimizers=True)
_finds_unused = partial(DDPStrategy, find_unused_parameters=True)

_registry: dict[str, Callable[[], Strategy]] = {
    "single": Strategy,
    "ddp": DDPStrategy,
    "ddp_spawn": DDPStrategy,
    "ddp_fork": partial(DDPStrategy, "fork"),
    "ddp_forkserver": partial(DDPStrategy, "forkserver"),
    "ddp_zero": _zero,
    "ddp_sharded": _zero,
    "ddp_sharded_spawn": _zero,
    "ddp_find_unused_parameters_true": _finds_unused,
    "ddp_spawn_find_unused_parameters_true": _finds_unused,
    "ddp_spawn_find_unused_parameters_false": partial(DDPStrategy, find_unused_parameters=False),
}


def register_strategy(name: str, make: Callable[[], Strategy]) -> None:
    """Register ``make`` as the strategy that ``Trainer(strategy=name)`` creates.

    Args:
        name: The new name.
        make: A function that creates the strategy.

    Raises:
        ValueError: If the name is taken.
    """
    if name in _registry:
        raise ValueError(f"The strategy {name!r} is registered already. Use another name. [J264]")
    _registry[name] = make


def strategies() -> list[str]:
    """Return the names that ``Trainer(strategy=)`` accepts."""
    return sorted(_registry)


def strategy_of(strategy: str | Strategy) -> Strategy:
    """Return ``strategy``, or a new one if it is a registered name.

    Raises:
        ValueError: If the name is not registered.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if strategy not in _registry:
        raise ValueError(f"strategy={strategy!r} is unknown. Use one of {', '.join(strategies())}. {REST}. [J266]")
    return _registry[strategy]()

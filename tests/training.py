"""Training a case on uneven inputs, on ranks, and the same in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from join import Join
from joinables import ZeroStep
from tests import models
from tests.cases import DDP, Case, Data, Model, Optimizer, Shards
from tests.gpus import device_of_rank
from tests.models import BATCH, OPTIMIZERS, TOLERANCE, assert_same, batch, flat_state, learn_graph, value_of
from tests.pool import Pool
from tests.sync_norm import CPUSyncBatchNorm, sync_batch_norm_on_cpu
from tests.versions import CLIPS_COARSELY

TOLERANCE_OF_DOUBLES = 1e-8
TOLERANCE_OF_GPUS = 1e-5


def weight_of(data: Data, rank: int, epoch: int, step: int) -> int:
    """The number of samples in a batch; all the same, and no reason to weigh, unless there are weights."""
    return 2 + (rank + epoch + 2 * step) % 4 if data.weighted else BATCH


def device_of(model: Model) -> torch.device:
    """Where this rank trains; it is the current device then, which FSDP takes."""
    if model.device == "cpu":
        return torch.device("cpu")
    device = device_of_rank(model.device, dist.get_backend(), dist.get_rank())
    torch.accelerator.set_device_index(device)
    return device


def batch_of(data: Data, rank: int, epoch: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch(rank, epoch, step)
    return x[: weight_of(data, rank, epoch, step)], y[: weight_of(data, rank, epoch, step)]


def longer(data: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """A dummy that somebody makes of their last batch."""
    x, y = data
    return torch.cat([x, x + 1]), torch.cat([y, y])


def batches(join: Join, case: Case, rank: int, epoch: int) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's batches of an epoch; in lockstep, if the case has it so, and then with dummies."""
    device, loop = device_of(case.model), case.loop
    mine = [batch_of(case.data, rank, epoch, step) for step in range(case.data.counts[epoch][rank])]
    mine = [(x.to(device), y.to(device)) for x, y in mine]
    if not case.in_lockstep(epoch):
        return mine
    dummy: Any = longer if loop.iterate == "a function" else loop.iterate
    until: Any = loop.until
    weigh: Any = (lambda data: len(data[0])) if case.data.weighted else None
    window = case.step.accumulate
    return join.iterate(iter(mine), until, dummy=dummy, lookahead=loop.lookahead, weigh=weigh, window=window)


def build(model: Model) -> nn.Module:
    torch.manual_seed(0)
    return models.build(model.kind) if isinstance(model.kind, str) else model.kind.build()


def placed(model: Model) -> nn.Module:
    """The module, where this rank trains; its batch norms are over all ranks, if they are to be."""
    module = build(model).to(device_of(model))
    if not model.synchronised:
        return module
    module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    for part in module.modules() if model.device == "cpu" else ():
        if isinstance(part, nn.SyncBatchNorm):
            part.__class__ = CPUSyncBatchNorm
    return module


def optimizer_of(optimizer: Optimizer, module: nn.Module, *, alone: bool = False) -> Any:
    """The optimizer of a module's parameters; not sharded in a process that trains ``alone``."""
    cls, options = OPTIMIZERS[optimizer.kind]
    if optimizer.rate is not None:
        options = {**options, "lr": optimizer.rate}
    if alone or not optimizer.zero:
        return cls(module.parameters(), **options)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(module.parameters(), cls, parameters_as_bucket_view=optimizer.zero_views, **options)


def branch_of(rank: int, step: int) -> int:
    """A number that says which branches of a model a rank takes at a step."""
    return rank + step


def loss_of(module: Any, case: Case, epoch: int, branch: int, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    kind, (x, y) = case.model.kind, data
    loss = torch.zeros((), device=x.device)
    for forward in range(case.step.forwards):
        if isinstance(kind, str):
            output = module(x, branch % 2) if kind == "branches" else module(x)
        else:
            output = module(x + forward, branch)
        loss = loss + ((value_of(output) - y) ** 2).mean()
    return loss if case.scales(epoch) and not case.step.divided else loss / case.step.accumulate


def full_state(optimizer: Any) -> Any:
    """The state dict; of a sharded optimizer, with all shards."""
    state = None
    for to in range(dist.get_world_size() if hasattr(optimizer, "consolidate_state_dict") else 0):
        optimizer.consolidate_state_dict(to=to)  # drops what another rank holds, so each reads in its turn
        if dist.get_rank() == to:
            state = optimizer.state_dict()
    return state or optimizer.state_dict()


def mesh_of(device: str = "cpu", replicas: int = 1) -> Any:
    """All ranks, with their devices; without a mesh, ``fully_shard`` takes a GPU that the machine has."""
    from torch.distributed.device_mesh import init_device_mesh

    ranks = dist.get_world_size()
    shape = (ranks,) if replicas == 1 else (replicas, ranks // replicas)
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def shard(model: Model | None = None, shards: Shards | None = None) -> Any:
    """The module, its parts and then itself sharded."""
    from torch.distributed.fsdp import fully_shard

    model, shards = model or Model(), shards or Shards()
    module = placed(model)
    mesh = mesh_of(model.device, shards.replicas)
    for unit in shards.units:
        for part in reversed(list(module.modules())):
            if unit in [kind.__name__ for kind in type(part).__mro__]:
                fully_shard(part, mesh=mesh, reshard_after_forward=shards.reshard)
    sharded: Any = fully_shard(module, mesh=mesh, reshard_after_forward=shards.reshard)
    for part in sharded.modules() if not shards.divides else ():
        if hasattr(part, "set_gradient_divide_factor"):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply
    return sharded


def whole(tree: Any) -> Any:
    """``tree`` with every sharded tensor put together; on all ranks alike."""
    from torch.distributed.tensor import DTensor

    return pytree.tree_map_only(DTensor, lambda tensor: tensor.full_tensor(), tree)


def wrapped(model: Model, wrapper: DDP | Shards) -> Any:
    """The module, sharded or in DDP."""
    if isinstance(wrapper, Shards):
        return shard(model, wrapper)
    ddp = DistributedDataParallel(placed(model), **wrapper.options)
    if wrapper.hook == "allreduce":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        ddp.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)
    return ddp


def accumulating(module: Any, wrapper: DDP | Shards, *, sync: bool) -> AbstractContextManager[None]:
    """What a step of a window goes on in; only the last one has to synchronise gradients."""
    if not isinstance(wrapper, Shards):
        return nullcontext() if sync else module.no_sync()
    if wrapper.syncs == "reduces when it steps":
        module.set_requires_gradient_sync(sync)
    elif wrapper.syncs == "all-reduces when it steps":
        module.set_requires_all_reduce(sync)
    return nullcontext()


def train(rank: int, case: Case) -> dict[str, torch.Tensor]:
    with nullcontext() if case.model.device == "cuda" else sync_batch_norm_on_cpu():
        return _train(rank, case)


def _train(rank: int, case: Case) -> dict[str, torch.Tensor]:
    loop, what = case.loop, case.step
    trained = wrapped(case.model, case.wrapper)
    model: Any = torch.compile(trained, backend="eager") if case.model.compiled else trained
    first = [each.to(device_of(case.model)) for each in batch(rank, 0, 0)]
    learn_graph(trained, lambda: loss_of(trained, case, 0, branch_of(rank, 0), (first[0], first[1])))
    optimizer = optimizer_of(case.optimizer, trained)

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 0.1)

    stepper = ZeroStep(optimizer, transform_gradients=clip) if case.optimizer.zero and what.clip else optimizer
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, case.optimizer.decay)
    epochs = range(len(case.data.counts))
    join: Any = None
    for block in [epochs] if loop.one_block else [[epoch] for epoch in epochs]:
        listed = [model, stepper, scheduler]
        if join is None or not loop.one_join:
            divisor = what.accumulate if what.divided else 1
            join = Join(listed, divide_by_initial_world_size=what.initial, loss_divided_by=divisor)
        with join:
            for epoch in block:
                in_lockstep, scales = case.in_lockstep(epoch), case.scales(epoch)
                for step, data in enumerate(batches(join, case, rank, epoch)):
                    if not in_lockstep:
                        join.weight = (len(data[0]) if case.data.weighted else 1) if scales else None
                    if what.evaluates and (step if case.is_sharded else rank + step) % 2:
                        trained.eval()
                        with torch.no_grad():
                            loss_of(model, case, epoch, branch_of(rank, step), data)
                        trained.train()
                    sync = join.ends_window if in_lockstep else (step + 1) % what.accumulate == 0
                    if step % (what.accumulate * what.zero_every) == 0:
                        optimizer.zero_grad(set_to_none=what.to_none)
                    with accumulating(trained, case.wrapper, sync=sync):
                        loss = loss_of(model, case, epoch, branch_of(rank, step), data)
                        divided_over = 1 if isinstance(case.wrapper, Shards) and not case.wrapper.divides else None
                        (join.scale(loss, divided_over) if scales else loss).backward()
                    if sync:
                        if what.clip:
                            clip()
                        optimizer.step()
                        scheduler.step()
                    if step + 1 == loop.stop and case.in_lockstep(epoch):
                        break
    if case.is_sharded:
        return flat_state(whole(trained.state_dict()), whole(optimizer.state_dict()), scheduler.state_dict())
    return flat_state(trained.module.state_dict(), full_state(optimizer), scheduler.state_dict())


def reference(case: Case) -> dict[str, torch.Tensor]:
    """One process: the gradients of all ranks that have data, averaged; buffers of the lowest of them."""
    model = build(case.model)
    optimizer = optimizer_of(case.optimizer, model, alone=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, case.optimizer.decay)
    data, what = case.data, case.step
    k = what.accumulate
    for epoch in range(len(data.counts)):
        counts, scales = case.trained(epoch), case.scales(epoch)
        steps = max(counts)
        for window in range(-(-steps // k) if case.in_lockstep(epoch) else steps // k):
            end = min((window + 1) * k, steps)
            if window % what.zero_every == 0:
                optimizer.zero_grad(set_to_none=what.to_none)
            ranks = [rank for rank in range(data.ranks) if counts[rank] > window * k]
            divisor = data.ranks if what.initial else len(ranks)
            windows = {rank: range(window * k, min((window + 1) * k, counts[rank])) for rank in ranks}
            total = sum(weight_of(data, rank, epoch, step) for rank, own in windows.items() for step in own)
            if what.initial and not data.weighted and case.in_lockstep(epoch):
                total = BATCH * data.ranks * (end - window * k)
            shared = [b.clone() for b in model.buffers()]
            kept = None
            if case.model.synchronised:
                for step in range(window * k, end):
                    parts = [batch_of(data, rank, epoch, step) for rank in ranks if counts[rank] > step]
                    together = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
                    share = len(parts) * BATCH / total if scales else len(parts) / divisor
                    (loss_of(model, case, epoch, 0, together) * share).backward()
                kept = [b.clone() for b in model.buffers()]
            for rank in ranks if not case.model.synchronised else ():
                for buffer, value in zip(model.buffers(), shared, strict=True):
                    buffer.copy_(value)
                for step in windows[rank]:
                    loss = loss_of(model, case, epoch, branch_of(rank, step), batch_of(data, rank, epoch, step))
                    share = weight_of(data, rank, epoch, step) / total if scales else 1 / divisor
                    (loss * share * (k if what.divided else 1)).backward()
                # The leader is the lowest rank that takes part in the synchronised step.
                if kept is None and counts[rank] >= end:
                    kept = [b.clone() for b in model.buffers()]
            for buffer, value in zip(model.buffers(), kept or [], strict=True):
                buffer.copy_(value)
            if what.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
    return flat_state(model.state_dict(), optimizer.state_dict(), scheduler.state_dict())


def check(pool: Pool, case: Case, by: Callable[..., Any] = train, **options: Any) -> None:
    """Train on as many ranks as the case has: all end the same, bit for bit, and as one process does."""
    states = [*pool.run(by, case, ranks=case.data.ranks, **options), reference(case)]
    if isinstance(case.wrapper, Shards) and not case.model.synchronised:  # each rank keeps statistics of its own
        states = [{key: value for key, value in state.items() if not _is_statistic(key)} for state in states]
    *states, expected = states
    for other in states[1:]:
        assert_same(states[0], other)
    assert_same(states[0], expected, tolerance_of(case))


def tolerance_of(case: Case) -> float:
    """How far a case may be from one process, which computes on the CPU."""
    if case.model.device == "cuda":
        return TOLERANCE_OF_GPUS
    if CLIPS_COARSELY and isinstance(case.wrapper, Shards) and case.step.clip:
        return TOLERANCE
    return TOLERANCE if isinstance(case.model.kind, str) else TOLERANCE_OF_DOUBLES


def _is_statistic(key: str) -> bool:
    return key.endswith((".running_mean", ".running_var", ".num_batches_tracked"))

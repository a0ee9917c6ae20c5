"""Training on uneven inputs, one way to do it as a :class:`Case`, and the same in one process."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from join import Join
from joinables import Replay, SharedCall, ZeroStep
from tests import models
from tests.grammar import Recipe
from tests.models import BATCH, OPTIMIZERS, TOLERANCE, assert_same, batch, flat_state, value_of
from tests.pool import Pool
from tests.sync_norm import CPUSyncBatchNorm, sync_batch_norm_on_cpu
from tests.versions import CLIPS_COARSELY

TOLERANCE_OF_DOUBLES = 1e-8
TOLERANCE_OF_GPUS = 1e-5


@dataclass(frozen=True)
class Setup:
    """What is trained: the model, what wraps it, its optimizer, and where they are."""

    model: str | Recipe = "mlp"
    optimizer: str = "adam"
    rate: float | None = None
    decay: float = 0.9  # of the learning rate, at each step
    zero: bool = False
    zero_views: bool = False
    ddp: dict[str, Any] = field(default_factory=dict[str, Any])
    hook: str = ""
    compiled: bool = False
    replay: bool = False  # the module is listed to be replayed
    synchronised: bool = False  # its batch norms are
    device: str = "cpu"  # or "cuda": with NCCL a device for each rank, with gloo one for all


@dataclass(frozen=True)
class Data:
    """What ranks have; counts[epoch][rank] is the number of batches."""

    counts: tuple[tuple[int, ...], ...] = ((0, 3, 1), (2, 0, 4), (3, 1, 0))
    weighted: bool = False  # batches are of several sizes, and count by them

    @property
    def ranks(self) -> int:
        return len(self.counts[0])


@dataclass(frozen=True)
class Loop:
    """What an epoch is like: the block, how it goes over the data, and what a step does."""

    initial: bool = False
    declared: bool = False
    iterate: str = ""  # over join.iterate, with these dummies: "empty", "last" or "a function"
    lookahead: int = 1
    until: str = "all"
    stop: int | None = None  # all ranks break out of join.iterate after as many steps
    one_block: bool = False  # for all epochs
    one_join: bool = False  # a block for each epoch, of the same Join
    plain_last: bool = False  # the last epoch is not over join.iterate
    accumulate: int = 1
    to_none: bool = True
    zero_every: int = 1  # optimizer steps; in between, gradients pile up
    clip: bool = False
    forwards: int = 1  # before each backward
    evaluates: bool = False  # at some steps


@dataclass(frozen=True)
class Case(Loop, Data, Setup):
    """One way to train."""

    def in_lockstep(self, epoch: int) -> bool:
        return bool(self.iterate) and not (self.plain_last and epoch == len(self.counts) - 1)

    def trained(self, epoch: int) -> tuple[int, ...]:
        """How many of its batches each rank comes to."""
        counts = self.counts[epoch]
        if not self.in_lockstep(epoch):
            return counts
        most = min(counts) if self.until == "first" else max(counts)
        return tuple(min(count, most, most if self.stop is None else self.stop) for count in counts)


@dataclass(frozen=True)
class Sharded(Case):
    """One way to train with ``fully_shard``."""

    replicas: int = 1
    reshard: bool | None = None
    units: tuple[type[nn.Module], ...] = (nn.Linear,)  # parts that are sharded before the whole, inner kinds first
    syncs: str = "reduces when it steps"


def weight_of(case: Data, rank: int, epoch: int, step: int) -> int:
    """The number of samples in a batch; all the same, and no reason to weigh, unless the case has weights."""
    return 2 + (rank + epoch + 2 * step) % 4 if case.weighted else BATCH


def device_of(case: Setup) -> torch.device:
    """Where this rank trains; it is the current device then, which FSDP takes."""
    if case.device == "cpu":
        return torch.device("cpu")
    device = torch.device(case.device, dist.get_rank() if dist.get_backend() == "nccl" else 0)
    torch.cuda.set_device(device)
    return device


def data_of(case: Data, rank: int, epoch: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch(rank, epoch, step)
    return x[: weight_of(case, rank, epoch, step)], y[: weight_of(case, rank, epoch, step)]


def longer(data: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """A dummy that somebody makes of their last batch."""
    x, y = data
    return torch.cat([x, x + 1]), torch.cat([y, y])


def batches(join: Join, case: Case, rank: int, epoch: int) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's batches of an epoch; in lockstep, if the case has it so, and then with dummies."""
    device = device_of(case)
    mine = [data_of(case, rank, epoch, step) for step in range(case.counts[epoch][rank])]
    mine = [(x.to(device), y.to(device)) for x, y in mine]
    if not case.in_lockstep(epoch):
        return mine
    loader = mine if case.declared else iter(mine)
    dummy: Any = longer if case.iterate == "a function" else case.iterate
    until: Any = case.until
    return join.iterate(loader, until, dummy=dummy, lookahead=case.lookahead)


def build(case: Setup) -> nn.Module:
    torch.manual_seed(0)
    return models.build(case.model) if isinstance(case.model, str) else case.model.build()


def placed(case: Setup) -> nn.Module:
    """The model of a case, where this rank trains; its batch norms are over all ranks, if the case has it so."""
    model = build(case).to(device_of(case))
    if not case.synchronised:
        return model
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for part in model.modules() if case.device == "cpu" else ():
        if isinstance(part, nn.SyncBatchNorm):
            part.__class__ = CPUSyncBatchNorm
    return model


def optimizer_of(case: Setup) -> tuple[Any, dict[str, Any]]:
    """The class of the optimizer, and what it is given."""
    cls, options = OPTIMIZERS[case.optimizer]
    return cls, options if case.rate is None else {**options, "lr": case.rate}


def branch_of(rank: int, step: int) -> int:
    """A number that says which branches of a model a rank takes at a step."""
    return rank + step


def loss_of(model: Any, case: Case, branch: int, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = data
    loss = torch.zeros((), device=x.device)
    for forward in range(case.forwards):
        if isinstance(case.model, str):
            output = model(x, branch % 2) if case.model == "branches" else model(x)
        else:
            output = model(x + forward, branch)
        loss = loss + ((value_of(output) - y) ** 2).mean()
    return loss if case.weighted else loss / case.accumulate  # weights make a mean of the micro-batches too


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


def shard(case: Sharded) -> Any:
    """The model of a case, its parts and then itself sharded."""
    from torch.distributed.fsdp import fully_shard

    model = placed(case)
    mesh = mesh_of(case.device, case.replicas)
    for kind in case.units:
        for part in reversed(list(model.modules())):
            if isinstance(part, kind):
                fully_shard(part, mesh=mesh, reshard_after_forward=case.reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=case.reshard)


def whole(tree: Any) -> Any:
    """``tree`` with every sharded tensor put together; on all ranks alike."""
    from torch.distributed.tensor import DTensor

    return pytree.tree_map_only(DTensor, lambda tensor: tensor.full_tensor(), tree)


def wrapped(case: Setup) -> Any:
    """The model of a case, sharded or in DDP."""
    if isinstance(case, Sharded):
        return shard(case)
    ddp = DistributedDataParallel(placed(case), **case.ddp)
    if case.hook == "allreduce":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        ddp.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)
    return ddp


def accumulating(model: Any, case: Case, *, sync: bool) -> AbstractContextManager[None]:
    """What a step of a window goes on in; only the last one has to synchronise gradients."""
    if not isinstance(case, Sharded):
        return nullcontext() if sync else model.no_sync()
    if case.syncs == "reduces when it steps":
        model.set_requires_gradient_sync(sync)
    elif case.syncs == "all-reduces when it steps":
        model.set_requires_all_reduce(sync)
    return nullcontext()


def train(rank: int, case: Case) -> dict[str, torch.Tensor]:
    with sync_batch_norm_on_cpu():
        return _train(rank, case)


def _train(rank: int, case: Case) -> dict[str, torch.Tensor]:
    trained = wrapped(case)
    is_sharded = isinstance(case, Sharded)
    replays = is_sharded or case.replay
    model = torch.compile(trained, backend="eager") if case.compiled else trained
    cls, options = optimizer_of(case)
    if case.zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: Any = ZeroRedundancyOptimizer(
            trained.parameters(), cls, parameters_as_bucket_view=case.zero_views, **options
        )
    else:
        optimizer = cls(trained.parameters(), **options)

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 0.1)

    stepper = ZeroStep(optimizer, transform_gradients=clip) if case.zero and case.clip else optimizer
    clipping: Any = SharedCall(clip) if is_sharded else clip
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, case.decay)
    epochs = range(len(case.counts))
    join: Any = None
    for block in [epochs] if case.one_block else [[epoch] for epoch in epochs]:
        steps: Any = None
        if case.declared:
            steps = "loader" if case.iterate else case.counts[block[0]][rank] // case.accumulate
        listed = [Replay(trained) if case.replay else model, stepper, scheduler]
        if is_sharded and case.clip:
            listed.insert(1, clipping)
        if join is None or not case.one_join:
            join = Join(listed, divide_by_initial_world_size=case.initial, steps=steps)
        join.weight = 1 if case.weighted else None
        with join:
            for epoch in block:
                for step, data in enumerate(batches(join, case, rank, epoch)):
                    join.weight = len(data[0]) if case.weighted else None
                    # Ranks without data replay these forwards, too, so all evaluate in the same steps.
                    if case.evaluates and (step if replays else rank + step) % 2:
                        trained.eval()
                        with torch.no_grad():
                            loss_of(model, case, branch_of(rank, step), data)
                        trained.train()
                    sync = (step + 1) % case.accumulate == 0
                    if step % (case.accumulate * case.zero_every) == 0:
                        optimizer.zero_grad(set_to_none=case.to_none)
                    with accumulating(trained, case, sync=sync):
                        loss_of(model, case, branch_of(rank, step), data).backward()
                    if sync:
                        if case.clip:
                            clipping()
                        optimizer.step()
                        scheduler.step()
                    if step + 1 == case.stop and case.in_lockstep(epoch):
                        break
    if is_sharded:
        return flat_state(whole(trained.state_dict()), whole(optimizer.state_dict()), scheduler.state_dict())
    return flat_state(trained.module.state_dict(), full_state(optimizer), scheduler.state_dict())


def reference(case: Case) -> dict[str, torch.Tensor]:
    """One process: the gradients of all ranks that have data, averaged; buffers of the lowest of them."""
    model = build(case)
    cls, options = optimizer_of(case)
    optimizer = cls(model.parameters(), **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, case.decay)
    k = case.accumulate
    for epoch in range(len(case.counts)):
        counts = case.trained(epoch)
        for window in range(max(counts) // k):
            if window % case.zero_every == 0:
                optimizer.zero_grad(set_to_none=case.to_none)
            ranks = [rank for rank in range(case.ranks) if counts[rank] > window * k]
            divisor = case.ranks if case.initial else len(ranks)
            windows = {rank: range(window * k, min((window + 1) * k, counts[rank])) for rank in ranks}
            total = sum(weight_of(case, rank, epoch, step) for rank, steps in windows.items() for step in steps)
            shared = [b.clone() for b in model.buffers()]
            kept = None
            if case.synchronised:
                for step in range(window * k, (window + 1) * k):
                    parts = [data_of(case, rank, epoch, step) for rank in ranks if counts[rank] > step]
                    together = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
                    (loss_of(model, case, 0, together) * len(parts) / divisor).backward()
                kept = [b.clone() for b in model.buffers()]
            for rank in ranks if not case.synchronised else ():
                for buffer, value in zip(model.buffers(), shared, strict=True):
                    buffer.copy_(value)
                for step in windows[rank]:
                    loss = loss_of(model, case, branch_of(rank, step), data_of(case, rank, epoch, step))
                    share = weight_of(case, rank, epoch, step) / total if case.weighted else 1 / divisor
                    (loss * share).backward()
                # The leader is the lowest rank that takes part in the synchronised step.
                if kept is None and counts[rank] >= (window + 1) * k:
                    kept = [b.clone() for b in model.buffers()]
            for buffer, value in zip(model.buffers(), kept or [], strict=True):
                buffer.copy_(value)
            if case.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
    return flat_state(model.state_dict(), optimizer.state_dict(), scheduler.state_dict())


def check(pool: Pool, case: Case, **options: Any) -> None:
    """Train on as many ranks as the case has: all end the same, bit for bit, and as one process does."""
    states = [*pool.run(train, case, ranks=case.ranks, **options), reference(case)]
    if isinstance(case, Sharded) and not case.synchronised:  # each rank keeps statistics of its own
        states = [{key: value for key, value in state.items() if not _is_statistic(key)} for state in states]
    *states, expected = states
    for other in states[1:]:
        assert_same(states[0], other)
    assert_same(states[0], expected, tolerance_of(case))


def tolerance_of(case: Case) -> float:
    """How far a case may be from one process, which computes on the CPU."""
    if case.device == "cuda":
        return TOLERANCE_OF_GPUS
    if CLIPS_COARSELY and isinstance(case, Sharded) and case.clip:
        return TOLERANCE
    return TOLERANCE if isinstance(case.model, str) else TOLERANCE_OF_DOUBLES


def _is_statistic(key: str) -> bool:
    return key.endswith((".running_mean", ".running_var", ".num_batches_tracked"))

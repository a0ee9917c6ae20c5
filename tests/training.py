"""What tests train: small models, data that is the same in each process, and a :class:`Case` of how to train them.

A case is plain data, and prints as it is made, so that a random case that failed can be put into a test. :func:`train`
trains a case on ranks, and :func:`reference` in a single process. :func:`check` does both, and compares.
"""

from __future__ import annotations

import copy
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from join import Join
from joinables import ZeroStep
from tests.gpus import device_of_rank
from tests.harness import Epochs, Pool, first_and_last
from tests.sync_norm import CPUSyncBatchNorm, sync_batch_norm_on_cpu
from tests.versions import CLIPS_COARSELY

if TYPE_CHECKING:
    from tests.grammar import Recipe

FEATURES, TARGETS, BATCH = 4, 2, 5
TOLERANCE, TOLERANCE_OF_DOUBLES, TOLERANCE_OF_GPUS = 2e-6, 1e-8, 1e-5
STATISTICS = (".running_mean", ".running_var", ".num_batches_tracked")

# -- models and data --------------------------------------------------------------------------------------------------


def batch(rank: int, epoch: int, step: int, stream: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch that ``rank`` sees at a step; the same wherever it is asked for."""
    generator = torch.Generator().manual_seed(1 + rank + 10 * epoch + 1000 * step + 100000 * stream)
    return torch.randn(BATCH, FEATURES, generator=generator), torch.randn(BATCH, TARGETS, generator=generator)


def learn_graph(ddp: Any, loss: Callable[[], torch.Tensor]) -> None:
    """Run the step before the block that a ``static_graph`` module needs; it changes nothing else."""
    if getattr(ddp, "static_graph", False):
        state = copy.deepcopy(ddp.state_dict())
        with torch.random.fork_rng(devices=[]):
            loss().backward()
        ddp.load_state_dict(state)
        ddp.zero_grad()


class MLP(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, TARGETS))


class Norm(nn.Sequential):
    # No bias before BatchNorm: its gradient is zero but for rounding, which Adam would blow up to full steps.
    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__(nn.Linear(FEATURES, 8, bias=False), nn.BatchNorm1d(8, eps), nn.Tanh(), nn.Linear(8, TARGETS))


class Frozen(nn.Sequential):
    """Its first and third layers do not train."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, TARGETS))
        for index in (0, 2):
            self[index].requires_grad_(False)


class Branches(nn.Module):
    """Uses another branch on every rank, and one parameter nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, 8)
        self.heads = nn.ModuleList(nn.Linear(8, TARGETS) for _ in range(3))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.heads[branch](torch.tanh(self.stem(x)))


@dataclass
class Output:
    value: torch.Tensor
    label: str


class Opaque:
    """An object that nobody can look into for tensors."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Wrapped(nn.Module):
    """Returns its result inside a container."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.body, self.container = MLP(), container

    def forward(self, x: torch.Tensor) -> Any:
        y = self.body(x)
        if self.container == "tuple":
            return y, (2 * y, "text")
        if self.container == "dict":
            return {"value": y, "nested": [{"twice": 2 * y}]}
        return Output(y, "text") if self.container == "dataclass" else Opaque(y)


def value_of(output: Any) -> torch.Tensor:
    """The main tensor in a model's output."""
    if isinstance(output, tuple):
        return output[0] + output[1][0]
    if isinstance(output, dict):
        return output["value"] + output["nested"][0]["twice"]
    return output.value if isinstance(output, (Output, Opaque)) else output


def build(kind: str | Recipe) -> nn.Module:
    """The model of this name or recipe, the same in each process."""
    torch.manual_seed(0)
    if not isinstance(kind, str):
        return kind.build()
    if kind in ("tuple", "dict", "dataclass", "opaque"):
        return Wrapped(kind)
    if kind == "norm with a large eps":
        return Norm(0.1)
    return {"mlp": MLP, "norm": Norm, "branches": Branches, "frozen": Frozen}[kind]()


def flat_state(*parts: Any) -> dict[str, torch.Tensor]:
    """All tensors and numbers of nested state, by path, as float64 on the CPU."""
    found: dict[str, torch.Tensor] = {}

    def visit(path: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[path] = value.detach().to("cpu", torch.float64, copy=True)
        elif isinstance(value, bool) or value is None or isinstance(value, str):
            found[path] = torch.tensor(float(zlib.crc32(str(value).encode())), dtype=torch.float64)
        elif isinstance(value, (int, float)):
            found[path] = torch.tensor(float(value), dtype=torch.float64)
        elif isinstance(value, dict):
            for key, each in value.items():
                visit(f"{path}.{key}", each)
        elif isinstance(value, (list, tuple)):
            for index, each in enumerate(value):
                visit(f"{path}.{index}", each)

    for index, part in enumerate(parts):
        visit(str(index), part)
    return found


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    """Compare two flat states; ``tolerance`` is absolute."""
    assert left.keys() == right.keys(), sorted(left.keys() ^ right.keys())
    for path, value in left.items():
        difference = (value - right[path]).abs().max().item() if value.numel() else 0.0
        assert difference <= tolerance, f"{path} differs by {difference:.2e}"


def mlp_in_one_process(counts: Sequence[int], epochs: int = 1, lr: float = 1e-3) -> list[torch.Tensor]:
    """Train the MLP by Adam in a single process, on the batches of ranks with these ``counts``; its parameters.

    The data of each epoch are the same: those of epoch 0.
    """
    model = build("mlp")
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for step in [*range(max(counts))] * epochs:
        x, y = zip(*(batch(rank, 0, step) for rank, count in enumerate(counts) if step < count), strict=True)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(torch.cat(x)), torch.cat(y)).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


# -- a way to train ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """What is trained, and where."""

    kind: str | Recipe = "mlp"  # a name that build knows, or a recipe
    synchronised: bool = False  # its batch norms are
    compiled: bool = False
    device: str = "cpu"  # or "cuda" or "sim": one for all ranks with gloo, else one for each
    hidden: bool = False  # its result is in an attribute, and its forward returns a copy without a graph


@dataclass(frozen=True)
class DDP:
    """How a model is put into ``DistributedDataParallel``."""

    options: dict[str, Any] = field(default_factory=dict[str, Any])
    hook: str = ""  # or "allreduce"


@dataclass(frozen=True)
class Shards:
    """How a model is sharded by ``fully_shard``."""

    replicas: int = 1
    reshard: bool | None = None
    units: tuple[str, ...] = ("Linear",)  # classes of parts that are sharded before the whole, inner ones first
    syncs: str = "reduces when it steps"
    divides: bool = True  # gradients by the number of ranks, or not at all


@dataclass(frozen=True)
class Optimizer:
    """An optimizer, and how its learning rate decays."""

    kind: str = "adam"
    rate: float | None = None
    decay: float = 0.9  # of the learning rate, at each step
    zero: bool = False
    zero_views: bool = False


@dataclass(frozen=True)
class Data:
    """What ranks have; counts[epoch][rank] is the number of batches."""

    counts: Epochs = ((0, 3, 1), (2, 0, 4), (3, 1, 0))
    weighted: bool = False  # batches are of several sizes, and count by them

    @property
    def ranks(self) -> int:
        return len(self.counts[0])

    def samples(self, rank: int, epoch: int, step: int) -> int:
        """The number of samples in a batch, by which it counts."""
        return 2 + (rank + epoch + 2 * step) % 4 if self.weighted else BATCH

    def batch(self, rank: int, epoch: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch(rank, epoch, step)
        samples = self.samples(rank, epoch, step)
        return x[:samples], y[:samples]


@dataclass(frozen=True)
class Loop:
    """The blocks, and how they go over the data."""

    iterate: str = ""  # over join.iterate, with these dummies: "empty", "last" or "a function"
    lookahead: int = 1  # with 0, each batch is in the memory of the one before
    until: str = "all"
    stop: int | None = None  # all ranks break out of join.iterate after as many steps
    one_block: bool = False  # for all epochs
    one_join: bool = False  # a block for each epoch, of the same Join
    plain_last: bool = False  # the last epoch is not over join.iterate


@dataclass(frozen=True)
class Step:
    """What a step does, and by what its gradients are divided."""

    initial: bool = False  # by all ranks, also those without data
    accumulate: int = 1
    divided: bool = False  # the loss by that number, also with weights: Join is told
    to_none: bool = True
    zero_every: int = 1  # optimizer steps; in between, gradients pile up
    clip: bool = False
    forwards: int = 1  # before each backward
    evaluates: bool = False  # at some steps
    draws: bool = False  # a factor of the loss, from generators that all ranks seeded alike


@dataclass(frozen=True)
class Case:
    """One way to train."""

    model: Model = field(default_factory=Model)
    wrapper: DDP | Shards = field(default_factory=DDP)
    optimizer: Optimizer = field(default_factory=Optimizer)
    data: Data = field(default_factory=Data)
    loop: Loop = field(default_factory=Loop)
    step: Step = field(default_factory=Step)

    def scales(self, epoch: int) -> bool:
        """Whether losses go through ``join.scale``: gradients are the mean over micro-batches, too."""
        in_window = self.in_lockstep(epoch) and (self.step.accumulate > 1 or self.model.synchronised or self.is_sharded)
        return self.data.weighted or self.step.divided or in_window

    @property
    def is_sharded(self) -> bool:
        """Whether the forward communicates, so that all ranks must run it."""
        return isinstance(self.wrapper, Shards)

    def in_lockstep(self, epoch: int) -> bool:
        return bool(self.loop.iterate) and not (self.loop.plain_last and epoch == len(self.data.counts) - 1)

    def trained(self, epoch: int) -> tuple[int, ...]:
        """How many of its batches each rank comes to."""
        counts = self.data.counts[epoch]
        if not self.in_lockstep(epoch):
            return counts
        most = min(counts) if self.loop.until == "first" else max(counts)
        return tuple(min(count, most, most if self.loop.stop is None else self.loop.stop) for count in counts)


def shorter(case: Case) -> Case:
    """A case of three epochs is one of two in ``make test``."""
    return replace(case, data=replace(case.data, counts=first_and_last(case.data.counts)))


# -- training it ------------------------------------------------------------------------------------------------------


class OwnAttributes(torch.optim.Optimizer):
    """Momentum, with its state in attributes: a list that the first step makes, a count, and a flag that comes back."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.momentum: list[torch.Tensor] = []
        self.count, self.is_odd = 0, False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.momentum = self.momentum or [torch.zeros_like(parameter) for parameter in parameters]
        self.count, self.is_odd = self.count + 1, not self.is_odd
        for parameter, mean in zip(parameters, self.momentum, strict=True):
            if parameter.grad is not None:
                mean.mul_(0.9).add_(parameter.grad)
                parameter.sub_(mean, alpha=self.param_groups[0]["lr"] * (1 + 0.5 * self.is_odd) / self.count)


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain sgd": (torch.optim.SGD, {"lr": 0.05}),
    "own attributes": (OwnAttributes, {"lr": 0.05}),
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}


def device_of(model: Model) -> torch.device:
    """Where this rank trains; it is the current device then, which FSDP takes."""
    if model.device == "cpu":
        return torch.device("cpu")
    device = device_of_rank(model.device, dist.get_backend(), dist.get_rank())
    torch.accelerator.set_device_index(device)
    return device


def longer(data: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """A dummy that somebody makes of their last batch."""
    x, y = data
    return torch.cat([x, x + 1]), torch.cat([y, y])


def in_one_place(
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches in the same memory, as some loaders do."""
    place: list[torch.Tensor] = []
    for batch in batches:
        place = place or [torch.empty(2 * BATCH, *each.shape[1:], dtype=each.dtype) for each in batch]
        x, y = (there[: len(each)].copy_(each) for there, each in zip(place, batch, strict=True))
        yield x, y


def seed() -> None:
    """Seed the global generators alike on all ranks."""
    random.seed(3)
    torch.manual_seed(3)


def draw() -> float:
    """Draw a factor of a loss from the global generators."""
    return 0.5 + random.random() + float(torch.rand(()))


def batches(join: Join, case: Case, rank: int, epoch: int) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's batches of an epoch; in lockstep, if the case has it so, and then with dummies."""
    device, loop = device_of(case.model), case.loop
    mine = [case.data.batch(rank, epoch, step) for step in range(case.data.counts[epoch][rank])]
    mine = [(x.to(device), y.to(device)) for x, y in mine]
    if not case.in_lockstep(epoch):
        return mine
    if not loop.lookahead:
        mine = in_one_place(mine)
    dummy: Any = longer if loop.iterate == "a function" else loop.iterate
    until: Any = loop.until
    weigh: Any = (lambda data: len(data[0])) if case.data.weighted else None
    window = case.step.accumulate
    return join.iterate(iter(mine), until, dummy=dummy, lookahead=loop.lookahead, weigh=weigh, window=window)


def hide(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    """A forward hook that shows the result of a module in an attribute only."""
    module.shown = output
    return output.detach()


def placed(model: Model) -> nn.Module:
    """The module, where this rank trains; its batch norms are over all ranks, if they are to be."""
    module = build(model.kind).to(device_of(model))
    if model.hidden:
        module.register_forward_hook(hide)
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
        output = getattr(getattr(module, "module", None), "shown", output)
        loss = loss + ((value_of(output) - y) ** 2).mean()
    return loss if case.scales(epoch) and not case.step.divided else loss / case.step.accumulate


def full_state(optimizer: Any) -> Any:
    """The state dict; of a sharded optimizer, with all shards."""
    state = None
    if isinstance(optimizer, OwnAttributes):
        return {**optimizer.state_dict(), "own": [optimizer.momentum, optimizer.count, optimizer.is_odd]}
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
    seed()
    for block in [epochs] if loop.one_block else [[epoch] for epoch in epochs]:
        listed = [model, stepper, scheduler]
        if join is None or not loop.one_join:
            divisor = what.accumulate if what.divided else 1
            join = Join(listed, divide_by_initial_world_size=what.initial, loss_divided_by=divisor)
        with join:
            for epoch in block:
                in_lockstep, scales = case.in_lockstep(epoch), case.scales(epoch)
                for step, data in enumerate(batches(join, case, rank, epoch)):
                    factor = draw() if what.draws else 1.0
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
                        loss = factor * loss_of(model, case, epoch, branch_of(rank, step), data)
                        divided_over = 1 if isinstance(case.wrapper, Shards) and not case.wrapper.divides else None
                        (join.scale(loss, divided_over) if scales else loss).backward()
                    if sync:
                        if what.clip:
                            clip()
                        optimizer.step()
                        scheduler.step()
                    if step + 1 == loop.stop and case.in_lockstep(epoch):
                        break
    drawn = [draw()] if what.draws else []
    if case.is_sharded:
        return flat_state(whole(trained.state_dict()), whole(optimizer.state_dict()), scheduler.state_dict(), drawn)
    return flat_state(trained.module.state_dict(), full_state(optimizer), scheduler.state_dict(), drawn)


def reference(case: Case) -> dict[str, torch.Tensor]:
    """One process: the gradients of all ranks that have data, averaged; buffers of the lowest of them."""
    model = build(case.model.kind)
    optimizer = optimizer_of(case.optimizer, model, alone=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, case.optimizer.decay)
    data, what = case.data, case.step
    k = what.accumulate
    seed()
    for epoch in range(len(data.counts)):
        counts, scales = case.trained(epoch), case.scales(epoch)
        steps = max(counts)
        factors = [draw() if what.draws else 1.0 for _ in range(steps)]
        for window in range(-(-steps // k) if case.in_lockstep(epoch) else steps // k):
            end = min((window + 1) * k, steps)
            if window % what.zero_every == 0:
                optimizer.zero_grad(set_to_none=what.to_none)
            ranks = [rank for rank in range(data.ranks) if counts[rank] > window * k]
            divisor = data.ranks if what.initial else len(ranks)
            windows = {rank: range(window * k, min((window + 1) * k, counts[rank])) for rank in ranks}
            total = sum(data.samples(rank, epoch, step) for rank, own in windows.items() for step in own)
            if what.initial and not data.weighted and case.in_lockstep(epoch):
                total = BATCH * data.ranks * (end - window * k)
            shared = [b.clone() for b in model.buffers()]
            kept = None
            if case.model.synchronised:
                for step in range(window * k, end):
                    parts = [data.batch(rank, epoch, step) for rank in ranks if counts[rank] > step]
                    together = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
                    share = factors[step] * (len(parts) * BATCH / total if scales else len(parts) / divisor)
                    (loss_of(model, case, epoch, 0, together) * share).backward()
                kept = [b.clone() for b in model.buffers()]
            for rank in ranks if not case.model.synchronised else ():
                for buffer, value in zip(model.buffers(), shared, strict=True):
                    buffer.copy_(value)
                for step in windows[rank]:
                    loss = loss_of(model, case, epoch, branch_of(rank, step), data.batch(rank, epoch, step))
                    share = factors[step] * (data.samples(rank, epoch, step) / total if scales else 1 / divisor)
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
    drawn = [draw()] if what.draws else []
    return flat_state(model.state_dict(), full_state(optimizer), scheduler.state_dict(), drawn)


def check(pool: Pool, case: Case, by: Callable[..., Any] = train, **options: Any) -> None:
    """Train on as many ranks as the case has: all end the same, bit for bit, and as one process does."""
    states = [*pool.run(by, case, ranks=case.data.ranks, **options), reference(case)]
    if isinstance(case.wrapper, Shards) and not case.model.synchronised:  # each rank keeps statistics of its own
        states = [{key: value for key, value in state.items() if not key.endswith(STATISTICS)} for state in states]
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

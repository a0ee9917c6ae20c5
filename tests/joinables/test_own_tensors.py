"""Dummies leave buffers and frozen parameters unchanged, and after the loop they are those of a rank with data."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from join import Join
from joinables import LossGate
from tests.harness import Pool, all_or_each
from tests.training import TOLERANCE, assert_same, batch, flat_state, mesh_of, whole
from tests.versions import OWN_BUFFERS

COUNTS = 2, 4, 0, 3


class Writes(torch.nn.Module):
    """Adds to a buffer, puts another tensor in the place of a second, and enlarges a third."""

    seen: torch.Tensor
    log: torch.Tensor
    rank: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm = torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2)
        for name in ("seen", "last", "log", "rank"):
            self.register_buffer(name, torch.zeros(1))

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.last = x.sum().detach().reshape(1)
        self.log = torch.cat([self.log, self.seen])
        return self.norm(checkpoint(self.count, x, use_reentrant=False))

    def count(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 100  # twice in each step, since the backward runs it again
        return self.body(x)


def wrapped(how: str, module: Any) -> Any:
    if how == "gate":
        return DistributedDataParallel(LossGate(module), **OWN_BUFFERS)
    if how == "DDP":
        return DistributedDataParallel(module, **OWN_BUFFERS)
    if how == "FSDP1":
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)
    mesh = mesh_of(replicas=2 if how in ("HSDP", "tensor parallel") else 1)
    if how == "tensor parallel":
        parallelize_module(module, mesh["shard"], {"body": ColwiseParallel(output_layouts=Replicate())})
        return fully_shard(module, mesh=mesh["replicate"])
    for part in module.children():
        fully_shard(part, mesh=mesh)
    return module if how == "parts" else fully_shard(module, mesh=mesh)


def write(rank: int, how: str, dummy: Any) -> dict[str, torch.Tensor]:
    module = Writes()
    model = wrapped(how, module)
    module.rank.fill_(rank)
    source = (1, 1, 2, 2)[rank] if how == "tensor parallel" else rank  # pairs of ranks share a batch
    mine = [batch(source, 0, step) for step in range(COUNTS[source])]
    with Join([model], divide_by_initial_world_size=False) as join:
        for x, y in join.iterate(mine, dummy=dummy):
            before = flat_state({name: each.clone() for name, each in module.named_buffers()})
            join.scale((model(x) - y).square().mean()).backward()
            assert len(x) == (5 if dummy == "last" or not join.shadowing else 0)
            if join.shadowing:
                assert_same(flat_state(dict(module.named_buffers())), before)
    return dict(module.named_buffers())


@pytest.mark.parametrize(
    ("how", "dummy"),
    all_or_each(product(["DDP", "FSDP1", "FSDP2", "HSDP", "tensor parallel", "parts"], ["empty", "last"])),
)
def test_buffers(pool: Pool, how: str, dummy: str) -> None:
    alone = Writes()
    for step in range(4):
        alone(batch(1, 0, step)[0]).sum().backward()
    for rank, buffers in enumerate(pool.run(write, how, dummy, ranks=4)):
        assert buffers["rank"] == rank  # it was different when the loop began
        if how == "DDP":  # the user wants each rank to have buffers of its own
            assert buffers["seen"] == 201 * COUNTS[rank]
            continue
        for name, expected in alone.named_buffers():
            if name != "rank":
                torch.testing.assert_close(buffers[name], expected)


class Momentum(torch.nn.Module):
    """Its forward moves frozen parameters, and then refuses an empty batch."""

    def __init__(self, idiom: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.idiom = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2), idiom
        self.key.requires_grad_(False)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                if self.idiom == "new data":
                    key.data = key.data * 0.5 + query.data * 0.5
                else:
                    (key.data if self.idiom == "data" else key).mul_(0.5).add_(query, alpha=0.5)
        if not len(x):
            raise ValueError("It is empty.")
        return self.query(x) - self.key(x).tanh()


def follow(rank: int, how: str, dummy: Any, idiom: str) -> dict[str, torch.Tensor]:
    module = Momentum(idiom)
    model = wrapped(how, module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        with Join([model, optimizer], divide_by_initial_world_size=False) as join:
            for x, y in join.iterate([batch(rank, epoch, step) for step in range(COUNTS[rank])], dummy=dummy):
                optimizer.zero_grad()
                before = module.key.weight.clone()
                loss = ((module if how == "gate" else model)(x) - y).square().mean()
                join.scale(model(loss) if how == "gate" else loss).backward()
                assert how not in ("DDP", "gate") or torch.equal(module.key.weight, before) == join.shadowing
                optimizer.step()
    return flat_state(whole(module.state_dict()))


WAYS = [("DDP", dummy, idiom) for dummy in ("empty", "last") for idiom in ("in place", "data", "new data")]

OTHERS = [("gate", "last", "in place"), *[(how, "empty", "in place") for how in ("FSDP2", "HSDP")]]


@pytest.mark.parametrize(("how", "dummy", "idiom"), [*all_or_each(WAYS), *OTHERS])
def test_a_momentum_encoder(pool: Pool, how: str, dummy: str, idiom: str) -> None:
    module = Momentum(idiom)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for epoch, step in product(range(2), range(4)):
        optimizer.zero_grad()
        data = [batch(rank, epoch, step) for rank in range(4) if step < COUNTS[rank]]
        x, y = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
        (module(x) - y).square().mean().backward()
        optimizer.step()
    for state in pool.run(follow, how, dummy, idiom, ranks=4):
        assert_same(state, flat_state(module.state_dict()), TOLERANCE)


def through_a_gate(rank: int) -> float:
    """Two losses in a step, of modules that run before the gate; and a change outside, which counts."""
    module = Writes()
    model = DistributedDataParallel(LossGate(module), find_unused_parameters=True, **OWN_BUFFERS)
    with Join([model]) as join:
        for x, _ in join.iterate([batch(rank, 0, step) for step in range(COUNTS[rank])], dummy="last"):
            for _ in range(2):
                join.scale(model(module.norm(module(x)).sum())).backward()
                module.seen += 1000
            module.eval()
            with torch.no_grad():
                model(module(x).sum())
            module.train()
    return float(module.seen)


def test_parts_before_a_loss_gate(pool: Pool) -> None:
    evaluated = 101
    for count, seen in zip(COUNTS, pool.run(through_a_gate, ranks=4), strict=True):
        assert seen == 4 * (2000 + evaluated) + count * 2 * 201


def evaluate(rank: int, how: str) -> float:
    module = Writes()
    model = wrapped(how, module)
    with Join([model]) as join:
        for x, y in join.iterate([batch(rank, 0, step) for step in range(COUNTS[rank])]):
            join.scale((model(x) - y).square().mean()).backward()
            model.eval()
            with torch.no_grad():
                model(batch(rank, 1, 0)[0])
                model(x[:0])
            model.train()
            seen = float(module.seen)
    return seen


@pytest.mark.parametrize("how", ["DDP", "FSDP2"])
def test_an_evaluation_between_dummies(pool: Pool, how: str) -> None:
    for count, seen in zip(COUNTS, pool.run(evaluate, how, ranks=4), strict=True):
        assert seen == 4 * 101 + count * (201 + 101)


class Adapter(torch.nn.Module):
    """Its frozen part is larger than the trained one, so that it is not copied for each dummy."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.head = torch.nn.Linear(4, 8).requires_grad_(False), torch.nn.Linear(8, 2)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.base.weight.mul_(0.5)
        if not len(x):
            raise ValueError("It is empty.")
        return self.head(self.base(x))


def adapt(rank: int) -> torch.Tensor:
    model = DistributedDataParallel(Adapter())
    with Join([model], divide_by_initial_world_size=False) as join:
        for x, y in join.iterate([batch(rank, 0, step) for step in range(COUNTS[rank])]):
            join.scale((model(x) - y).square().mean()).backward()
    return model.module.base.weight.clone()


def test_a_large_frozen_part_is_right_after_the_loop(pool: Pool) -> None:
    for weight in pool.run(adapt, ranks=4):
        torch.testing.assert_close(weight, Adapter().base.weight / 2**4)


class Clones(TorchDispatchMode):
    """Counts the bytes that are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.bytes += args[0].nbytes if func is torch.ops.aten.clone.default else 0  # pyright: ignore[reportUnknownMemberType]
        return func(*args, **(kwargs or {}))


class Large(torch.nn.Module):
    """Buffers of 88 bytes, trained parameters of 368, and frozen ones of 80, or of 400, which is more."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.trained, self.norm = torch.nn.Linear(4, 10), torch.nn.BatchNorm1d(10)
        self.head, self.frozen = torch.nn.Linear(10, 2), torch.nn.Linear(4, width).requires_grad_(False)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.trained(x))) + self.frozen(x).mean(1, keepdim=True)


def copies(rank: int, how: str, width: int) -> list[int]:
    model = wrapped(how, Large(width))
    copied = list[int]()
    with Join([model]) as join:
        for x, y in join.iterate([batch(rank, 0, step) for step in range(rank % 3)]):
            with Clones() as clones:
                output = model(x)
            copied.append(clones.bytes)
            join.scale((output - y).square().mean()).backward()
    return copied


OF_DUMMIES = [("DDP", 4, 168), ("DDP", 20, 88), *[(how, 4, 88) for how in ("FSDP1", "FSDP2", "HSDP")]]


@pytest.mark.parametrize(("how", "width", "of_dummy"), OF_DUMMIES)
def test_own_tensors_are_copied_for_dummies_only(pool: Pool, how: str, width: int, of_dummy: int) -> None:
    """Their buffers, and under DDP their frozen parameters, unless these are larger than the trained ones."""
    for rank, copied in enumerate(pool.run(copies, how, width, ranks=4)):
        assert copied == [0] * (rank % 3) + [of_dummy] * (2 - rank % 3)

"""Modules with collectives of their own: on uneven inputs they equal one process on the same batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from join import Join
from joinables import SharedCall
from tests.joinables.test_exact import EPOCHS, Case, forward, reference, weight_of
from tests.models import OPTIMIZERS, TOLERANCE, assert_same, build, flat_state
from tests.pool import Pool


@dataclass(frozen=True)
class Sharded(Case):
    """One way to train with ``fully_shard``."""

    replicas: int = 1
    reshard: bool | None = None
    layers: bool = True
    reduce_each: bool = False


CASES = {
    "adam": Sharded(),
    "sgd, initial world size": Sharded(optimizer="sgd", initial=True),
    "the root alone": Sharded(layers=False),
    "adam, initial, resharded": Sharded(initial=True, reshard=True),
    "never resharded": Sharded(optimizer="sgd", reshard=False),
    "adamw with clipping": Sharded(optimizer="adamw", clip=True),
    "accumulation": Sharded(accumulate=2, counts=((4, 2, 0), (3, 6, 1), (0, 5, 4))),
    "accumulation, initial, resharded": Sharded(
        accumulate=2, initial=True, reshard=True, counts=((4, 2, 0), (3, 6, 1), (0, 5, 4))
    ),
    "accumulation, each backward reduces": Sharded(
        accumulate=2, reduce_each=True, counts=((4, 2, 0), (2, 6, 0), (0, 4, 4))
    ),
    "zero_grad keeps tensors": Sharded(to_none=False, optimizer="sgd"),
    "weights": Sharded(weighted=True),
    "weights, accumulation": Sharded(
        weighted=True, initial=True, accumulate=3, counts=((6, 4, 0), (3, 9, 5), (1, 6, 2))
    ),
    "weights, tuple": Sharded(weighted=True, model="tuple"),
    "tuple": Sharded(model="tuple"),
    "dict": Sharded(model="dict"),
    "dataclass": Sharded(model="dataclass"),
    "frozen parameters": Sharded(model="frozen"),
    "replicas": Sharded(replicas=2, counts=((0, 3, 1, 2), (2, 0, 4, 1), (3, 1, 0, 0))),
    "replicas, initial, resharded": Sharded(
        replicas=2, initial=True, reshard=True, counts=((0, 3, 1, 2), (2, 0, 4, 1), (3, 1, 0, 0))
    ),
    "replicas, accumulation, weights, clipping": Sharded(
        replicas=2, weighted=True, accumulate=2, clip=True, counts=((4, 2, 0, 1), (3, 6, 1, 2), (0, 5, 4, 4))
    ),
    "declared": Sharded(declared=True),
    "declared, weights, clipping, initial": Sharded(declared=True, weighted=True, clip=True, initial=True),
    "even": Sharded(counts=((2, 2, 2), (3, 3, 3), (1, 1, 1))),
    "nothing at all": Sharded(counts=((0, 0, 0), (0, 2, 0), (0, 0, 0))),
}


def shard(case: Sharded) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ranks = dist.get_world_size()
    shape = (ranks,) if case.replicas == 1 else (case.replicas, ranks // case.replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model = build(case.model)
    for layer in model.modules() if case.layers else ():
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh, reshard_after_forward=case.reshard)
    return fully_shard(model, mesh=mesh, reshard_after_forward=case.reshard)


def whole(tree: Any) -> Any:
    """``tree`` with every sharded tensor put together; on all ranks alike."""
    from torch.distributed.tensor import DTensor

    return pytree.tree_map_only(DTensor, lambda tensor: tensor.full_tensor(), tree)


def train(rank: int, case: Sharded) -> dict[str, torch.Tensor]:
    model = shard(case)
    cls, options = OPTIMIZERS[case.optimizer]
    optimizer = cls(model.parameters(), **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    clip = SharedCall(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    for epoch in range(EPOCHS):
        count = case.counts[epoch][rank]
        listed = [model, clip, optimizer, scheduler] if case.clip else [model, optimizer, scheduler]
        steps = count if case.declared else None
        join = Join(listed, divide_by_initial_world_size=case.initial, steps=steps)
        join.weight = 1 if case.weighted else None
        with join:
            for step in range(count):
                sync = (step + 1) % case.accumulate == 0
                join.weight = weight_of(case, rank, epoch, step) if case.weighted else None
                if step % case.accumulate == 0:
                    optimizer.zero_grad(set_to_none=case.to_none)
                model.set_requires_gradient_sync(sync or case.reduce_each)
                forward(model, case, rank, epoch, step).backward()
                if sync:
                    if case.clip:
                        clip()
                    optimizer.step()
                    scheduler.step()
    return flat_state(whole(model.state_dict()), whole(optimizer.state_dict()), scheduler.state_dict())


@pytest.mark.parametrize("name", CASES)
def test_sharded_equals_one_process(pool: Pool, name: str) -> None:
    case = CASES[name]
    states = pool.run(train, case, ranks=len(case.counts[0]))
    for other in states[1:]:
        assert_same(states[0], other)
    assert_same(states[0], reference(case), TOLERANCE)

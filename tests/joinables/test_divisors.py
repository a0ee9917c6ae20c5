"""Engines that do not divide gradients by the number of ranks: refused, or exact with the divisor that is passed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from join import Join, JoinError
from tests.ending import Ending
from tests.harness import Pool, all_or_each, in_test_all
from tests.training import TOLERANCE, assert_same, batch, build, flat_state, mesh_of, whole

COUNTS = 2, 4, 0, 1


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of several sizes."""
    sizes = [2 + (rank + step) % 3 for step in range(COUNTS[rank])]
    return [(x[:size], y[:size]) for step, size in enumerate(sizes) for x, y in [batch(rank, 0, step)]]


def all_reduced(tensor: torch.Tensor) -> Any:
    return dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0])  # pyright: ignore


class Scatters:
    """Sums, whatever it is asked for."""

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
        dist.reduce_scatter(output_tensor, list(input_tensor.chunk(group.size())), group=group)


def engine(how: str) -> Any:
    """A module, of whose parts some do not divide by the number of ranks."""
    model: Any = build("mlp")
    if how.startswith("FSDP1"):
        options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": True}
        if "HSDP" in how:
            options |= {"device_mesh": mesh_of(replicas=2), "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
        model = FullyShardedDataParallel(model, **options)
        if "hook" in how:
            hook = default_hooks.reduce_scatter_hook if "torch's" in how else lambda state, full, shard: shard.zero_()
            model.register_comm_hook(default_hooks.DefaultState(model.process_group), hook)
        return model
    if how == "DDP":
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(None, lambda _, bucket: all_reduced(bucket.buffer()))
        return ddp
    mesh = mesh_of(replicas=2 if "HSDP" in how else 1)
    parts = [fully_shard(part, mesh=mesh) for part in [*model.children(), model] if list(part.parameters())]
    for part in parts[:1] if "a part" in how else parts:
        if "factor" in how:
            part.set_gradient_divide_factor(float(dist.get_world_size()) if "usual" in how else 1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply
        if "scatter" in how:
            part.set_custom_reduce_scatter(Scatters())
        if "hook" in how:
            part.set_all_reduce_hook(lambda reduced: reduced.mul_(dist.get_world_size()))
    return model


def train(rank: int, how: str, divided_over: float | None, by_hand: bool = False, enable: bool = True) -> Any:
    """Train; ``by_hand``: losses are divided by the samples of all ranks, and nothing is listed."""
    model = engine(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    block: Any = {"joinables": [], "process_group": None} if by_hand else {"joinables": [model, optimizer]}
    with Join(**block, enable=enable, divide_by_initial_world_size=False) as join:
        for x, y in join.iterate(batches(rank if enable else 0), weigh=None if by_hand else lambda data: len(data[0])):
            optimizer.zero_grad()
            loss, samples = (model(x) - y).square().mean(1), torch.tensor(float(len(x)))
            if by_hand:
                dist.all_reduce(samples)
                (loss.sum() / samples).backward()
            else:
                join.scale(loss.mean(), divided_over).backward()
            optimizer.step()
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return flat_state(dict(model.named_parameters()))
    return flat_state(whole(getattr(model, "module", model).state_dict()))


def reference(ranks: int) -> dict[str, torch.Tensor]:
    model = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(max(COUNTS)):
        optimizer.zero_grad()
        parts = [batches(rank)[step] for rank in range(ranks) if COUNTS[rank] > step]
        x, y = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
        (model(x) - y).square().mean().backward()
        optimizer.step()
    return flat_state(model.state_dict())


def parts_of(row: tuple[Any, ...]) -> dict[str, Any]:
    return {**dict.fromkeys(row[0].split(", ")), "others": row[1:]}


@pytest.mark.parametrize(
    ("how", "divided_over", "by_hand"),
    all_or_each(
        [
            ("factor", 1, False),
            ("factor", None, True),
            ("the usual factor", None, False),
            ("HSDP, factor", 1, False),
            ("HSDP, factor", None, True),
            ("scatter", 1, False),
            ("HSDP, scatter", 2, False),  # the replicas average
            ("hook", 1, False),
            ("HSDP, hook", 1, False),
            ("DDP", 1, False),
            ("FSDP1", None, False),
            ("FSDP1, torch's hook", None, False),
            ("FSDP1, HSDP", None, False),
        ],
        parts_of,
    ),
)
def test_as_one_process(pool: Pool, how: str, divided_over: float | None, by_hand: bool) -> None:
    ranks = 4 if "HSDP" in how else 3
    for state in pool.run(train, how, divided_over, by_hand, ranks=ranks):
        assert_same(state, reference(ranks), TOLERANCE)


def refused(rank: int, how: str, enable: bool) -> str:
    with pytest.raises(JoinError) as caught:
        train(rank, how, None, enable=enable)
    return str(caught.value)


@pytest.mark.parametrize("enable", [True, pytest.param(False, marks=in_test_all)])
@pytest.mark.parametrize(
    ("how", "divisor"),
    [
        ("factor", "divided by 1.0, not by the 3 ranks"),
        pytest.param("factor of a part", "divided by 1.0, not by the 3 ranks", marks=in_test_all),
        ("scatter", "divided by Scatters, not"),
        ("hook of a part", "divided by <lambda>, not"),
        ("FSDP1, hook", "divided by <lambda>, not"),
        ("HSDP, factor", "divided by 1.0, not by the 4 ranks"),
        pytest.param("HSDP, scatter", "divided by Scatters, not", marks=in_test_all),
        pytest.param("HSDP, hook", "divided by <lambda>, not", marks=in_test_all),
    ],
)
def test_another_divisor_is_refused(ending: Ending, how: str, divisor: str, enable: bool) -> None:
    for text in ending.run(refused, how, enable, ranks=4 if "HSDP" in how else 3):
        assert divisor in text and "[J535]" in text

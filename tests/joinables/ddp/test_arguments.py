"""Every argument of DDP's constructor, and torch's comm hooks: as one process, or an error on entering the block."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, optimizer_overlap_hooks
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from join import Join
from joinables._torch.objects import zero_redundancy_optimizer
from tests.ending import Ending
from tests.harness import Pool, all_or_each
from tests.training import TOLERANCE, assert_same, batch, build, flat_state, learn_graph, mesh_of

PAGE = Path(__file__).parents[3] / "docs" / "support.md"
COUNTS = 2, 5, 0
WAYS = ["plain", "iterate"]
EXACT: dict[str, Callable[[], Any]] = {
    "device_ids": list,
    "output_device": lambda: None,
    "dim": lambda: 0,
    "broadcast_buffers": lambda: False,
    "init_sync": lambda: False,
    "process_group": dist.new_group,
    "bucket_cap_mb": lambda: 1e-5,
    "find_unused_parameters": lambda: True,
    "check_reduction": lambda: True,
    "gradient_as_bucket_view": lambda: True,
    "static_graph": lambda: True,
    "device_mesh": mesh_of,
    "bucket_cap_mb_list": lambda: [1, 1],
    "batched_grad_copy": lambda: True,
    "forward_sync_buffers": lambda: False,
}
"""Makes what is passed for an argument."""
OF_DDP = set(inspect.signature(DistributedDataParallel.__init__).parameters) - {"self", "module"}


def train(
    rank: int,
    ddp: Any,
    way: str = "iterate",
    *,
    optimizer: Any = None,
    until: Any = "all",
    scales: bool = False,
    steps: bool = True,
) -> dict[str, torch.Tensor]:
    """Train; until the first rank has no batch left, with nothing listed."""
    optimizer = optimizer or torch.optim.SGD(ddp.parameters(), lr=0.1)
    learn_graph(ddp, lambda: ddp(batch(rank, 0, 0)[0]).sum())
    of_block: dict[str, Any] = {"process_group": None} if until == "first" else {}
    with Join([] if of_block else [ddp, optimizer], divide_by_initial_world_size=False, **of_block) as join:
        mine = [batch(rank, 0, step) for step in range(2 + rank if of_block else COUNTS[rank])]
        for x, y in mine if way == "plain" else join.iterate(mine, until):
            optimizer.zero_grad()
            loss = (ddp(x) - y).square().mean()
            (join.scale(loss) if scales else loss).backward()
            if steps:
                optimizer.step()
    return flat_state(ddp.module.state_dict())


def reference(counts: tuple[int, ...] = COUNTS) -> dict[str, torch.Tensor]:
    model = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(max(counts)):
        optimizer.zero_grad()
        ranks = [rank for rank, count in enumerate(counts) if step < count]
        for x, y in (batch(rank, 0, step) for rank in ranks):
            ((model(x) - y).square().mean() / len(ranks)).backward()
        optimizer.step()
    return flat_state(model.state_dict())


def with_argument(rank: int, name: str, way: str) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of arguments that torch deprecates
        return train(rank, DistributedDataParallel(build("mlp"), **{name: EXACT[name]()}), way)


@pytest.mark.parametrize(("name", "way"), all_or_each(product(sorted(OF_DDP & EXACT.keys()), WAYS)))
def test_an_argument_is_exact(pool: Pool, name: str, way: str) -> None:
    for state in pool.run(with_argument, name, way):
        assert_same(state, reference(), TOLERANCE)


class Steps:
    """An optimizer as the hook wants it."""

    def step_param(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        parameter.data -= 0.1 * gradient


def unsupported(kind: str) -> Any:
    """A module with an argument, or a hook, that is refused."""
    model = build("mlp")
    last = list(model.named_parameters())[-2:]
    options: dict[str, Any] = {
        "delay_all_reduce_named_params": {
            "delay_all_reduce_named_params": last,
            "param_to_hook_all_reduce": next(model.parameters()),
        },
        "mixed_precision": {"mixed_precision": _MixedPrecision(torch.bfloat16)},
        "skip_all_reduce_unused_params": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    }
    hooks: dict[str, tuple[Any, Any]] = {
        "post_localSGD_hook": (local_sgd.PostLocalSGDState(None, None, 99), local_sgd.post_localSGD_hook),
        "PostLocalSGDState": (
            local_sgd.PostLocalSGDState(None, None, 99),
            default_hooks.fp16_compress_wrapper(local_sgd.post_localSGD_hook),  # pyright: ignore[reportArgumentType]
        ),
        "noop_hook": (None, debugging_hooks.noop_hook),
        "hook_then_optimizer_wrapper": (
            None,
            optimizer_overlap_hooks._hook_then_optimizer(
                default_hooks.allreduce_hook, optimizer_overlap_hooks._OptimizerHookState(Steps())
            ),
        ),
    }
    if kind == "_apply_optimizer_in_backward":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an import
            from torch.distributed.optim import _apply_optimizer_in_backward
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    if kind == "python_reducer":
        from torch._dynamo import config

        config.optimize_ddp = kind  # for this process, which ends with the test
    ddp = DistributedDataParallel(model, **options.get(kind, {}))
    if kind in hooks:
        ddp.register_comm_hook(*hooks[kind])
    return ddp


def refusal(rank: int, kind: str) -> str:
    with pytest.raises(ValueError, match=r"\[J536\]") as caught:
        train(rank, unsupported(kind), "plain")
    return str(caught.value)


def enters(rank: int) -> dict[str, str]:
    return {kind: refusal(rank, kind) for kind in (*REFUSED, *HOOKS, "PostLocalSGDState", "python_reducer")}


REFUSED = ["delay_all_reduce_named_params", "mixed_precision", "skip_all_reduce_unused_params"]
HOOKS = ["post_localSGD_hook", "noop_hook", "hook_then_optimizer_wrapper", "_apply_optimizer_in_backward"]


def test_what_is_not_supported_is_refused_by_name(ending: Ending) -> None:
    for refused in ending.run(enters):
        assert [kind for kind, text in refused.items() if kind not in text] == []


def keeps(rank: int, kind: str) -> dict[str, torch.Tensor]:
    ddp = unsupported(kind)
    return train(rank, ddp, optimizer=torch.optim.SGD(ddp.parameters(), 0.0 if "hook_" in kind else 0.1), until="first")


@pytest.mark.parametrize("kind", ["hook_then_optimizer_wrapper", "post_localSGD_hook"])
def test_what_is_not_supported_works_as_the_error_says(pool: Pool, kind: str) -> None:
    """Not with ``delay_all_reduce_named_params``: torch never waits for its all-reduce, so its result is by luck."""
    for state in pool.run(keeps, kind):
        assert_same(state, reference((2, 2, 2)), TOLERANCE)


@pytest.mark.parametrize("name", sorted(OF_DDP | {"python_reducer", *HOOKS}))
def test_the_page_names_it(name: str) -> None:
    """An argument that is new in torch goes into ``EXACT`` and onto the page, or is refused."""
    section = PAGE.read_text().partition("## Arguments of DDP")[2].partition("\n## Optimizers")[0]
    cells = [line.split("|") for line in section.splitlines() if line.startswith("|")]
    (row,) = [row for row in cells if re.search(rf"\b{name}\b", row[1])]
    assert ("[J536]" in row[2]) != (name in EXACT)


def steps_in_its_hook(rank: int, way: str, scales: bool, shards: bool = False) -> Any:
    """Gradients are views of the only bucket, which holds their mean when the hook steps."""
    ddp = DistributedDataParallel(build("mlp"), gradient_as_bucket_view=True)
    optimizer: Any = torch.optim.SGD(ddp.parameters(), lr=0.1)
    if shards:
        optimizer = zero_redundancy_optimizer()(ddp.parameters(), torch.optim.SGD, lr=0.1)
    group: Any = ddp.process_group

    def reduce(bucket: Any) -> Any:
        reduced = default_hooks.allreduce_hook(group, bucket)
        reduced.wait()
        optimizer.step()
        return reduced

    ddp.register_comm_hook(None, lambda _, bucket: reduce(bucket))
    try:
        return train(rank, ddp, way, optimizer=optimizer, scales=scales, steps=False)
    except Exception as error:
        return str(error)


def test_a_listed_optimizer_that_steps_inside_the_backward(ending: Ending) -> None:
    for state in ending.run(steps_in_its_hook, "iterate", True):
        assert_same(state, reference(), TOLERANCE)
    for way in WAYS:
        for text in ending.run(steps_in_its_hook, way, False):
            assert "[J537]" in text
    for text in ending.run(steps_in_its_hook, "plain", False, True):
        assert "ZeroRedundancyOptimizer stepped inside a backward" in text

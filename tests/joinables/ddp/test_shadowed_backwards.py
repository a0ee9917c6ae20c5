"""What a joined rank does for a backward of other ranks: as little as the objects of the block allow."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from join import Join, Joinable, JoinHook
from joinables.ddp.reduction import GradientSync
from tests.harness import Pool
from tests.training import TOLERANCE, batch, build, mlp_in_one_process

COUNTS = (1, 4, 3)


class Reader(Joinable, JoinHook):
    """A joinable of the user's that reads the gradients after each backward, on joined ranks too."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.read = module, list[list[torch.Tensor]]()

    def join_hook(self, **_: Any) -> JoinHook:
        return self

    join_device = property(lambda _: torch.device("cpu"))  # type: ignore[assignment]
    join_process_group = property(lambda _: dist.group.WORLD)  # type: ignore[assignment]

    def __call__(self) -> None:
        Join.notify_join_context(self)
        self.main_hook()

    def main_hook(self) -> None:
        dist.barrier()
        self.read.append(
            [parameter.grad.clone() for parameter in self.module.parameters() if parameter.grad is not None]
        )


def read(rank: int) -> list[list[torch.Tensor]]:
    ddp = DistributedDataParallel(build("mlp"))
    reader, optimizer = Reader(ddp), torch.optim.SGD(ddp.parameters(), lr=0.1)
    for epoch in range(2):  # in the first of which buckets are rebuilt
        with Join([ddp, reader, optimizer], divide_by_initial_world_size=False):
            for step in range(COUNTS[rank]):
                x, y = batch(rank, epoch, step)
                optimizer.zero_grad()
                (ddp(x) - y).square().mean().backward()
                reader()
                optimizer.step()
    return reader.read


def test_a_joinable_after_the_module_reads_the_gradients(pool: Pool) -> None:
    first, *others = pool.run(read)
    assert len(first) == 2 * max(COUNTS)
    for other in others:
        torch.testing.assert_close(other, first, atol=0, rtol=0)


def train_in_two_blocks(rank: int) -> list[torch.Tensor]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = DistributedDataParallel(build("mlp"))
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam)
    with Join([zero]), Join([ddp], divide_by_initial_world_size=False):
        for step in range(COUNTS[rank]):
            x, y = batch(rank, 0, step)
            zero.zero_grad()
            (ddp(x) - y).square().mean().backward()
            zero.step()
    return [parameter.detach() for parameter in ddp.parameters()]


def test_an_optimizer_of_another_block_steps_on_the_gradients(pool: Pool) -> None:
    for parameters in pool.run(train_in_two_blocks):
        torch.testing.assert_close(parameters, mlp_in_one_process(COUNTS), atol=TOLERANCE, rtol=0)


def calls(rank: int, layers: int) -> list[int]:
    """How many functions this rank has called, Python's and C's, in each backward that it shadowed."""
    ddp = DistributedDataParallel(nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers))))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    counts, main_hook = list[int](), GradientSync.main_hook

    def counted(burst: GradientSync) -> None:
        counts.append(0)

        def count(_: Any, event: str, __: Any) -> None:
            counts[-1] += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            main_hook(burst)
        finally:
            sys.setprofile(None)

    with mock.patch.object(GradientSync, "main_hook", counted), Join([ddp, optimizer]):
        for _ in range(COUNTS[rank]):
            optimizer.zero_grad()
            ddp(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    return counts


def test_nothing_is_called_for_each_parameter(pool: Pool) -> None:
    few, many = pool.run(calls, 2)[0], pool.run(calls, 50)[0]
    assert len(few) == max(COUNTS) - COUNTS[0]
    assert few[-1] == many[-1]


def train_with_a_hook_of_a_backward(rank: int) -> list[torch.Tensor]:
    """As torch's own hooks do, it adds a callback, which only works inside a backward."""
    ddp, calls = DistributedDataParallel(build("mlp")), list[int]()

    def averaged(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        torch.autograd.Variable._execution_engine.queue_callback(partial(calls.append, 1))  # pyright: ignore
        work: Any = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    hook: Any = lambda _, bucket: averaged(bucket)  # without annotations, which torch reads  # noqa: E731
    ddp.register_comm_hook(None, hook)
    optimizer = torch.optim.Adam(ddp.parameters())
    with Join([ddp, optimizer], divide_by_initial_world_size=False):
        for step in range(COUNTS[rank]):
            x, y = batch(rank, 0, step)
            optimizer.zero_grad()
            (ddp(x) - y).square().mean().backward()
            optimizer.step()
    assert len(calls) >= max(COUNTS)
    return [parameter.detach() for parameter in ddp.parameters()]


def test_a_comm_hook_runs_inside_a_backward(pool: Pool) -> None:
    for parameters in pool.run(train_with_a_hook_of_a_backward):
        torch.testing.assert_close(parameters, mlp_in_one_process(COUNTS), atol=TOLERANCE, rtol=0)


class Layouts(nn.Module):
    """Parameters of several shapes, layouts and dtypes; one has no elements, and one stands still."""

    def __init__(self) -> None:
        super().__init__()
        image = torch.arange(24.0).reshape(1, 2, 3, 4)
        self.parts = nn.ParameterList(
            nn.Parameter(each)
            for each in (
                torch.ones(()),
                torch.arange(6.0)[::2],
                torch.arange(6.0).reshape(2, 3),
                torch.arange(6.0).reshape(2, 3).t(),
                image.to(memory_format=torch.channels_last),
                torch.ones(2, 0),
                torch.ones(2, 2, dtype=torch.bfloat16),
            )
        )
        self.frozen = nn.Parameter(torch.arange(4.0).reshape(2, 2).t(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.stack([(each.float() ** 2).sum() for each in self.parts]).sum()


def of_all_layouts(rank: int) -> list[tuple[torch.Tensor, torch.Tensor | None, tuple[int, ...]]]:
    ddp = DistributedDataParallel(Layouts())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    with Join([ddp, optimizer], divide_by_initial_world_size=False):
        for _ in range(3 - 3 * rank):
            optimizer.zero_grad()
            ddp(torch.ones(2)).sum().backward()
            optimizer.step()
    return [(each.detach(), each.grad, each.stride()) for each in ddp.parameters()]


def test_parameters_of_all_layouts(pool: Pool) -> None:
    first, second = pool.run(of_all_layouts, ranks=2)
    torch.testing.assert_close(second, first)
    assert not torch.equal(first[4][0], Layouts().parts[4])

"""What every Collective does, as plain functions: each backend's ranks run CHECKS in order, under pytest or not."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from join import Burst, Join, JoinTimeoutError, PeerError
from join.collectives import Collective
from join.joinable import OnGroup
from join.transfer import broadcast_tensors, broadcast_tree
from tests.join.counter import Counter


def conforms(collective: Collective) -> None:
    """Check a collective of this package, which refuses wrong arguments, too."""
    operates(collective)
    check_arguments(collective)


def operates(collective: Collective) -> None:
    """Check any collective."""
    for check in CHECKS:
        check(collective)


def check_over_library(
    collective: Collective, rank: int, size: int, *checks: Callable[[Collective], None], times: int = 1
) -> None:
    """Check a collective on a rank that its library has started, from ``setup`` to ``teardown``."""
    for _ in range(times):
        with pytest.raises(ValueError, match="J818"):
            Join([], process_group=collective)
        told = rf"world_size={size + 1}\) is not possible.* which is rank {rank} of {size}\..*\[J817\]"
        with pytest.raises(ValueError, match=told):
            collective.setup(rank, size + 1)
        collective.setup(rank, size)
        for check in checks:
            check(collective)
        collective.teardown()
        collective.teardown()
    print(f"rank {rank} of {size}: {', '.join(check.__name__ for check in checks)}: {len(checks)} passed", flush=True)


def check_all_reduce(collective: Collective) -> None:
    rank, size = collective.rank, collective.world_size
    total = float(sum(range(size)))
    for op, expected in {"sum": [total, 2.0 * size], "min": [0.0, 2.0], "max": [size - 1.0, 2.0]}.items():
        tensor = torch.tensor([float(rank), 2.0])
        collective.all_reduce(tensor, op).wait()  # type: ignore[arg-type]
        assert tensor.tolist() == expected
    for dtype in (torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float64):
        tensor = torch.tensor(rank, dtype=dtype)
        collective.all_reduce(tensor).wait()
        assert tensor.dtype == dtype and tensor.shape == () and tensor.item() == total
    columns = torch.tensor([[float(rank), 1.0, 2.0], [3.0, 4.0, 5.0]]).t()
    collective.all_reduce(columns).wait()
    assert columns.t().tolist() == [[total, size, 2.0 * size], [3.0 * size, 4.0 * size, 5.0 * size]]
    collective.all_reduce(torch.zeros(0)).wait()


def check_broadcast(collective: Collective) -> None:
    rank, size = collective.rank, collective.world_size
    for source in range(size):
        for dtype in (torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.uint8):
            tensor = torch.full((2, 2), rank).to(dtype)
            collective.broadcast(tensor, source).wait()
            assert torch.equal(tensor, torch.full((2, 2), source).to(dtype))
        columns = torch.full((2, 3), float(rank)).t()
        collective.broadcast(columns, source).wait()
        assert columns.unique().tolist() == [source]
        scalar = torch.tensor(float("nan") if rank != source else 5.0)
        collective.broadcast(scalar, source).wait()
        assert scalar.item() == 5.0


def check_matched_by_order(collective: Collective) -> None:
    rank, size = collective.rank, collective.world_size
    tensors = [torch.tensor([float(rank + step)]) for step in range(5)]
    works = [collective.all_reduce(tensor) for tensor in tensors]
    everyone = [torch.zeros(1) for _ in range(size)]
    works.append(collective.all_gather(torch.tensor([float(rank)]), everyone))
    for work in reversed(works):
        work.wait()
        assert work.is_completed()
        assert work.wait()
    assert [tensor.item() for tensor in tensors] == [sum(range(size)) + size * step for step in range(5)]
    assert [tensor.item() for tensor in everyone] == list(range(size))


def check_waiting_can_end_early(collective: Collective) -> None:
    tensor = torch.ones(1)
    if collective.rank == 0:
        time.sleep(0.6)
    work = collective.all_reduce(tensor)
    if collective.rank != 0:
        assert not work.is_completed()
        with pytest.raises(RuntimeError):
            work.wait(timedelta(seconds=0.1))
    work.wait()
    assert tensor.item() == collective.world_size


def check_all_gather(collective: Collective) -> None:
    rank, size = collective.rank, collective.world_size
    for dtype in (torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float32, torch.complex64):
        for shape in ((), (3,), (0,), (2, 3)):
            mine = torch.full(shape, rank + 1).to(dtype)
            expected = [torch.full(shape, each + 1).to(dtype) for each in range(size)]
            outputs = [torch.zeros(shape, dtype=dtype) for _ in range(size)]
            collective.all_gather(mine, outputs).wait()
            assert all(map(torch.equal, outputs, expected)), (dtype, shape, outputs)
    columns = torch.full((3, 2), rank + 1.0, requires_grad=True).t()
    outputs = [torch.zeros(2, 3) for _ in range(size)]
    collective.all_gather(columns, outputs).wait()
    assert [tensor.unique().tolist() for tensor in outputs] == [[each + 1] for each in range(size)]
    assert not any(tensor.requires_grad for tensor in outputs)


def check_arguments(collective: Collective) -> None:
    size = collective.world_size
    for op in ("mean", "product", ""):
        with pytest.raises(ValueError, match=f"op='{op}' is unknown. Pass one of 'sum', 'min', 'max'."):
            collective.all_reduce(torch.zeros(1), op)  # type: ignore[arg-type]
    for source in (-1, size):
        with pytest.raises(ValueError, match=f"source={source} is not a rank"):
            collective.broadcast(torch.zeros(1), source)
        with pytest.raises(ValueError, match=f"source={source} is not a rank"):
            collective.broadcast_object(None, source)
    tensor, like = torch.zeros(2), [torch.zeros(2) for _ in range(size)]
    with pytest.raises(ValueError, match=f"outputs has {size + 1} tensors for {size} ranks"):
        collective.all_gather(tensor, [*like, torch.zeros(2)])
    for output in (torch.zeros(2, dtype=torch.float64), torch.zeros(3), torch.zeros(4)[::2]):
        text = f"{size} ranks (float{8 * output.element_size()}{list(output.shape)} on cpu)"
        with pytest.raises(ValueError, match=re.escape(text) + r".* the tensor is float32\[2\]"):
            collective.all_gather(tensor, [output] * size)
    for place in ((collective.rank, size + 1), (-1, size), (size, size)):
        with pytest.raises(ValueError, match=rf"is rank {collective.rank} of {size}\. .*J817"):
            collective.setup(*place)
    collective.setup(collective.rank, size)


def check_boolean_decision(collective: Collective) -> None:
    rank, size = collective.rank, collective.world_size
    for decisions in ([True] * size, [False] * size, [each == 0 for each in range(size)]):
        assert collective.reduce_boolean_decision(decisions[rank]) is all(decisions)
        assert collective.reduce_boolean_decision(decisions[rank], all=False) is any(decisions)


def check_barrier(collective: Collective) -> None:
    if collective.rank == collective.world_size - 1:
        time.sleep(0.1)
    called = time.monotonic()  # of one clock for all processes of a machine
    collective.barrier()
    left = time.monotonic()
    assert max(collective.all_gather_object(called)) <= min(collective.all_gather_object(left))


def check_objects(collective: Collective) -> None:
    rank, size = collective.rank, collective.world_size
    last = size - 1
    value = {"list": [1, None, "two"], "rank": rank}
    assert collective.broadcast_object(value, last) == {"list": [1, None, "two"], "rank": last}
    assert collective.broadcast_object(None, 0) is None
    values = [None if each == 0 else {"rank": each, "text": "x" * 100 * each} for each in range(size)]
    assert collective.all_gather_object(values[rank]) == values
    # an error on every rank, and what follows still meets
    with pytest.raises(RuntimeError, match=r"Some ranks cannot pickle the object to send .rank 0: .*lambda"):
        collective.broadcast_object(lambda: None, 0)
    with pytest.raises(RuntimeError, match=f"Some ranks cannot pickle the object to send .rank {last}: .*lambda"):
        collective.all_gather_object((lambda: None) if rank == last else "fine")
    assert collective.all_gather_object(rank) == list(range(size))


def check_transfer(collective: Collective) -> None:
    rank, source = collective.rank, collective.world_size - 1
    tree = {"a": torch.full((3,), rank), "b": [torch.tensor(float(rank)), (rank, "x")], 5: torch.zeros(0)}
    received = broadcast_tree(collective, tree if rank == source else None, source)
    assert torch.equal(received["a"], torch.full((3,), source))
    assert received["b"][0].item() == float(source)
    assert received["b"][1] == (source, "x")
    assert received[5].shape == (0,)
    assert broadcast_tree(collective, [], 0) == []

    mixed = [torch.full((2, 3), rank).t(), torch.tensor(rank, dtype=torch.float64), torch.full((4,), float(rank))]
    broadcast_tensors(collective, mixed, source)
    assert all(bool((tensor == source).all()) for tensor in mixed)


def check_kept(collective: Collective) -> None:
    collective.kept.agreed.add(-1)
    collective.kept.agreed.remove(-1)


def check_join(collective: Collective) -> None:
    """Rank r has r steps, so rank 0 has none."""
    rank, size = collective.rank, collective.world_size
    for _ in range(2):
        counter = Counter(collective)
        with Join([counter]) as join:
            for _ in range(rank):
                counter()
        assert counter.total == sum(range(size))
        assert counter.last_joiner is (rank == size - 1)
        assert [row["steps"] for row in join.report.to_dict()["ranks"]] == list(range(size))


def samples(rank: int, steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of several sizes."""
    numbers = torch.Generator().manual_seed(rank)
    sizes = [1 + (rank + step) % 3 for step in range(steps)]
    rows = [torch.randn(size, 3, dtype=torch.float64, generator=numbers) for size in sizes]
    return [(row[:, :2], row[:, 2:]) for row in rows]


def check_iterate(collective: Collective) -> None:
    """Rank r has r weighted batches. Gradients are summed by hand."""
    rank, size = collective.rank, collective.world_size
    model, alone = [torch.nn.Linear(2, 1, dtype=torch.float64) for _ in range(2)]
    loss, steps = torch.nn.functional.mse_loss, list[int]()
    for module in (model, alone):
        for parameter in module.parameters():
            torch.nn.init.constant_(parameter, 0.5)
    with Join([], process_group=collective) as join:
        for x, y in join.iterate(samples(rank, rank), weigh=lambda batch: len(batch[0])):
            model.zero_grad()
            join.scale(loss(model(x), y), divided_over=1).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                collective.finish(collective.all_reduce(parameter.grad))
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            steps.append(len(x))
    assert len(steps) == size - 1 and sum(map(bool, steps)) == rank
    for step in range(size - 1):
        held = [samples(other, other)[step] for other in range(step + 1, size)]
        x, y = (torch.cat(parts) for parts in zip(*held, strict=True))
        alone.zero_grad()
        loss(alone(x), y).backward()
        torch.optim.SGD(alone.parameters(), lr=0.1).step()
    torch.testing.assert_close(list(model.parameters()), list(alone.parameters()))


class Adds(OnGroup, Burst):
    """A joinable of one's own, which waits so that it sees the failure of another rank."""

    def __init__(self, collective: Collective) -> None:
        super().__init__(collective)
        self.collective = collective

    def add(self, mine: int) -> None:
        work = Join.notify_join_context(self)
        assert work is not None
        self.main_hook(mine)
        work.get_future().wait()

    def main_hook(self, mine: int = 0) -> None:
        self.collective.finish(self.collective.all_reduce(torch.tensor(mine)))


def fails(collective: Collective) -> None:
    """Rank 1 raises. The group of a collective is lost afterwards."""
    adds, raised = Adds(collective), collective.rank == 1
    expected = pytest.raises(ValueError if raised else PeerError, match=r"mine" if raised else "rank 1 failed: ValueE")
    with expected, Join([adds]):
        for step in range(3):
            adds.add(1)
            if raised and step == 1:
                raise ValueError("mine")


def times_out(collective: Collective) -> None:
    """Rank 1 arrives too late; on a busy machine, others may, too."""
    adds = Adds(collective)
    collective.barrier()
    with pytest.raises(JoinTimeoutError, match=r"(?i)ranks? [^.]*\b1\b"), Join([adds], timeout=1.0):
        adds.add(1)
        watch = collective.kept.watch
        while collective.rank == 1 and not watch.block.news.notes:
            watch.refresh(1.0)
        adds.add(1)


def refuses_ddp(collective: Collective) -> None:
    """A module that communicates by ``torch.distributed`` in a block over another library."""
    has_group = dist.is_initialized()
    if not has_group:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    told = rf"group=.*{type(collective).__name__}.* is not the .* of Dist.*\. .* write Join\(\[\],.*\[J016\]"
    with pytest.raises(ValueError, match=told):
        Join([model], process_group=collective)
    told = r"Join\(\[SGD\]\) lists no object that communicates.*another library.*\[J013\]"
    with pytest.raises(ValueError, match=told):
        Join([torch.optim.SGD(model.parameters())], process_group=collective)
    if not has_group:
        dist.destroy_process_group()


CHECKS: list[Callable[[Collective], None]] = [
    check_all_reduce,
    check_broadcast,
    check_matched_by_order,
    check_waiting_can_end_early,
    check_all_gather,
    check_boolean_decision,
    check_barrier,
    check_objects,
    check_transfer,
    check_kept,
    check_join,
    check_iterate,
]
CHECKS_OVER_LIBRARY = [*CHECKS, check_arguments, refuses_ddp]

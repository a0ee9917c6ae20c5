"""Tests on the ranks of Horovod: ``horovodrun --gloo -np 2 python -m tests.horovod.run``."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable, Iterable
from typing import Any

import horovod.torch as hvd  # pyright: ignore[reportMissingImports]
import pytest
import torch

from join import Join, PeerError
from join.collectives.horovod import HorovodCollective
from tests.conformance.collective_suite import CHECKS, conforms, fails, samples, times_out

HANGS_AFTER_SECONDS = 240
RATE = 0.1
Batches = list[tuple[torch.Tensor, torch.Tensor]]


def model() -> torch.nn.Module:
    made = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
    for number, parameter in enumerate(made.parameters()):
        torch.nn.init.constant_(parameter, 0.1 * number - 0.2)
    return made


def loss_of(module: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.mse_loss(module(batch[0]), batch[1])


def distributed(module: torch.nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9)
    return hvd.DistributedOptimizer(optimizer, named_parameters=module.named_parameters(), **options)


def train_alone(batches: Iterable[Batches]) -> list[torch.Tensor]:
    """Return the parameters after training in a single process, on the batches of all ranks in each step."""
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9)
    for each in batches:
        optimizer.zero_grad()
        loss_of(module, tuple(map(torch.cat, zip(*each, strict=True)))).backward()  # type: ignore[arg-type]
        optimizer.step()
    return list(module.parameters())


def uneven_training(collective: HorovodCollective) -> None:
    """Rank r has 2 r batches. ``hvd.DistributedOptimizer`` averages gradients over all ranks, as DDP does."""
    rank, size = collective.rank, collective.world_size
    steps = 2 * (size - 1)
    mine = samples(rank, 2 * rank)
    held = [[samples(other, 2 * other)[step] for other in range(size) if step < 2 * other] for step in range(steps)]

    module = model()
    optimizer, weighed = distributed(module), list[float]()
    with Join([], process_group=collective) as join:
        for batch in join.iterate(mine, weigh=lambda batch: len(batch[0])):
            optimizer.zero_grad()
            join.scale(loss_of(module, batch)).backward()
            optimizer.step()
            weighed.append(join.weight or 0.0)
    assert len(weighed) == steps and sum(map(bool, weighed)) == len(mine)
    torch.testing.assert_close(list(module.parameters()), train_alone(held))

    # Windows of two batches, which the optimizer counts itself.
    module = model()
    optimizer = distributed(module, backward_passes_per_step=2)
    with Join([], process_group=collective) as join:
        for batch in join.iterate(mine, weigh=lambda batch: len(batch[0]), window=2, fill_window=True):
            join.scale(loss_of(module, batch)).backward()
            if join.ends_window:
                optimizer.step()
                optimizer.zero_grad()
    windows = [sum(held[step : step + 2], Batches()) for step in range(0, steps, 2)]
    torch.testing.assert_close(list(module.parameters()), train_alone(windows))


def beside_join_of_horovod(collective: HorovodCollective) -> None:
    """``hvd.join`` divides by all ranks, including those without data."""
    rank, size = collective.rank, collective.world_size
    mine = [samples(rank, size)[step] for step in range(rank)]  # rank r has r batches
    module = model()
    optimizer = distributed(module)
    for batch in mine:
        optimizer.zero_grad()
        loss_of(module, batch).backward()
        optimizer.step()
    hvd.join()
    hvd.broadcast_parameters(module.state_dict(), root_rank=size - 1)

    over_all, over_contributors = [train_by_hand(size, divisor) for divisor in (lambda _: size, len)]
    torch.testing.assert_close(list(module.parameters()), over_all)
    differs = [not torch.allclose(ours, theirs) for ours, theirs in zip(over_all, over_contributors, strict=True)]
    assert any(differs)

    module = model()
    optimizer = distributed(module)
    with Join([], process_group=collective) as join:
        for batch in join.iterate(mine, weigh=lambda batch: 1.0):
            optimizer.zero_grad()
            join.scale(loss_of(module, batch)).backward()
            optimizer.step()
    torch.testing.assert_close(list(module.parameters()), over_contributors)


def train_by_hand(size: int, divisor: Callable[[list[torch.Tensor]], int]) -> list[torch.Tensor]:
    """Return the parameters after training on the sum of the ranks' losses, divided by a number for each step."""
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9)
    for step in range(size - 1):
        optimizer.zero_grad()
        losses = [loss_of(module, samples(other, size)[step]) for other in range(step + 1, size)]
        (torch.stack(losses).sum() / divisor(losses)).backward()
        optimizer.step()
    return list(module.parameters())


def fails_while_others_wait(collective: HorovodCollective) -> None:
    """Rank 1 raises while the other ranks wait in the step of their optimizer, and read no notes."""
    raised = collective.rank == 1
    module = model()
    optimizer = distributed(module)
    kind, told = (KeyError, "mine") if raised else (PeerError, "rank 1 failed: KeyError: 'mine'")
    with pytest.raises(kind, match=told), Join([], process_group=collective) as join:
        for step, batch in enumerate(join.iterate(samples(collective.rank, 3))):
            if raised and step == 1:
                raise KeyError("mine")
            optimizer.zero_grad()
            join.scale(loss_of(module, batch)).backward()
            optimizer.step()


ENDS = [fails, times_out, fails_while_others_wait]
"""Each needs processes of its own, since Horovod is shut down afterwards, and may not start again in all of them."""


def main(name: str) -> None:
    faulthandler.dump_traceback_later(HANGS_AFTER_SECONDS, exit=True)
    torch.set_num_threads(1)
    ends = {check.__name__: check for check in ENDS}
    checks = [ends[name]] if name else [conforms, uneven_training, beside_join_of_horovod]
    hvd.init()
    collective = HorovodCollective()
    rank, size = hvd.rank(), hvd.size()
    with pytest.raises(ValueError, match=rf"as rank {rank} of {size}\. .*\[J864\]"):
        collective.setup(rank, size + 1)
    collective.setup(rank, size)
    for check in checks:
        check(collective)
    collective.teardown()
    assert name or hvd.is_initialized()  # a collective shuts down what it has started, or what is lost
    count = sum(len(CHECKS) + 1 if check is conforms else 1 for check in checks)
    print(f"rank {rank} of {size}: {count} passed, 0 failed")


if __name__ == "__main__":
    main(*sys.argv[1:] or [""])

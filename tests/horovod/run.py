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
from join.collectives import Collective
from join.collectives.horovod import HorovodCollective
from joinables.trainer import Trainer
from tests.conformance.collective_suite import CHECKS_OVER_LIBRARY, check_over_library, fails, samples, times_out
from tests.examples import examples_of
from tests.joinables.trainer.modules import Classifier, loader
from tests.joinables.trainer.other_library import OPTIONS, check_trainer

HANGS_AFTER_SECONDS = 600
RATE = 0.1
Batches = list[tuple[torch.Tensor, torch.Tensor]]
loss_fn = torch.nn.functional.mse_loss


def made(start: float = 0.0) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
    for number, parameter in enumerate(model.parameters()):
        torch.nn.init.constant_(parameter, start + 0.1 * number - 0.2)
    return model


def loss_of(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return loss_fn(model(batch[0]), batch[1])


def distributed(model: torch.nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)


def train_alone(batches: Iterable[Batches], momentum: float = 0.9) -> list[torch.Tensor]:
    """Return the parameters after training in a single process, on the batches of all ranks in each step."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
    for each in batches:
        optimizer.zero_grad()
        loss_of(model, tuple(map(torch.cat, zip(*each, strict=True)))).backward()  # type: ignore[arg-type]
        optimizer.step()
    return list(model.parameters())


def held(size: int) -> list[Batches]:
    """The batches of all ranks in each step, where rank r has 2 r batches."""
    return [
        [samples(other, 2 * other)[step] for other in range(size) if step < 2 * other] for step in range(2 * size - 2)
    ]


def the_page(collective: Collective) -> None:
    """The lines of ``docs/engines.md`` over uneven batches. Ranks begin with models of their own."""
    rank, size = collective.rank, collective.world_size
    [example] = (each for each in examples_of("engines.md") if "horovod" in each.code)
    names = {"model": made(rank), "loader": samples(rank, 2 * rank), "loss_fn": loss_fn, "torch": torch}
    exec(example.code, names)
    torch.testing.assert_close(list(names["model"].parameters()), train_alone(held(size), momentum=0.0))


def in_windows(collective: Collective) -> None:
    """Windows of two batches, which ``hvd.DistributedOptimizer`` counts itself. It averages over all ranks, as DDP."""
    rank, size = collective.rank, collective.world_size
    model, weighed = made(), list[float]()
    optimizer = distributed(model, backward_passes_per_step=2)
    batches = samples(rank, 2 * rank)
    with Join([], process_group=collective) as join:
        for batch in join.iterate(batches, weigh=lambda batch: len(batch[0]), window=2, fill_window=True):
            join.scale(loss_of(model, batch)).backward()
            weighed.append(join.weight or 0.0)
            if join.ends_window:
                optimizer.step()
                optimizer.zero_grad()
    assert len(weighed) == 2 * (size - 1) and sum(map(bool, weighed)) == len(batches)
    steps = held(size)
    windows = [sum(steps[step : step + 2], Batches()) for step in range(0, len(steps), 2)]
    torch.testing.assert_close(list(model.parameters()), train_alone(windows))


def beside_join_of_horovod(collective: Collective) -> None:
    """``hvd.join`` divides by all ranks, including those without data."""
    rank, size = collective.rank, collective.world_size
    mine = [samples(rank, size)[step] for step in range(rank)]  # rank r has r batches
    model = made()
    optimizer = distributed(model)
    for batch in mine:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=size - 1)

    over_all, over_contributors = [train_by_hand(size, divisor) for divisor in (lambda _: size, len)]
    torch.testing.assert_close(list(model.parameters()), over_all)
    differs = [not torch.allclose(ours, theirs) for ours, theirs in zip(over_all, over_contributors, strict=True)]
    assert any(differs)

    model = made()
    optimizer = distributed(model)
    with Join([], process_group=collective) as join:
        for batch in join.iterate(mine, weigh=lambda batch: 1.0):
            optimizer.zero_grad()
            join.scale(loss_of(model, batch)).backward()
            optimizer.step()
    torch.testing.assert_close(list(model.parameters()), over_contributors)


def train_by_hand(size: int, divisor: Callable[[list[torch.Tensor]], int]) -> list[torch.Tensor]:
    """Return the parameters after training on the sum of the ranks' losses, divided by a number for each step."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for step in range(size - 1):
        optimizer.zero_grad()
        losses = [loss_of(model, samples(other, size)[step]) for other in range(step + 1, size)]
        (torch.stack(losses).sum() / divisor(losses)).backward()
        optimizer.step()
    return list(model.parameters())


def the_trainer(collective: Collective) -> None:
    check_trainer(collective, "horovod")


def fails_in_a_fit(collective: Collective) -> None:
    """Rank 1 raises in a step of the trainer, while the others have data."""

    class Fails(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if collective.rank == 1 and batch_idx == 1:
                raise KeyError("mine")
            return super().training_step(batch, batch_idx)

    kind, told = (KeyError, "mine") if collective.rank == 1 else (PeerError, "rank 1 failed: KeyError: 'mine'")
    with pytest.raises(kind, match=told):
        Trainer(strategy="horovod", **OPTIONS).fit(Fails(), loader(27, 4))


def fails_while_others_wait(collective: Collective) -> None:
    """Rank 1 raises while the other ranks wait in the step of their optimizer, and read no notes."""
    raised = collective.rank == 1
    model = made()
    optimizer = distributed(model)
    kind, told = (KeyError, "mine") if raised else (PeerError, "rank 1 failed: KeyError: 'mine'")
    with pytest.raises(kind, match=told), Join([], process_group=collective) as join:
        for step, batch in enumerate(join.iterate(samples(collective.rank, 3))):
            if raised and step == 1:
                raise KeyError("mine")
            optimizer.zero_grad()
            join.scale(loss_of(model, batch)).backward()
            optimizer.step()


ENDS = [fails, times_out, fails_while_others_wait, fails_in_a_fit]
"""Each needs processes of its own, since Horovod is shut down afterwards, and may not start again in all of them."""


def main(end: str = "") -> None:
    faulthandler.dump_traceback_later(HANGS_AFTER_SECONDS, exit=True)
    torch.set_num_threads(1)
    hvd.init()
    place = HorovodCollective(), hvd.rank(), hvd.size()
    if end:
        check_over_library(*place, *(check for check in ENDS if check.__name__ == end))
        return
    checks = [*CHECKS_OVER_LIBRARY, the_page, in_windows, beside_join_of_horovod, the_trainer]
    check_over_library(*place, *checks, times=2)
    assert hvd.is_initialized()  # a collective shuts down what it has started, or what is lost


if __name__ == "__main__":
    main(*sys.argv[1:])

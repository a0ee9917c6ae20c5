"""Recipe: an engine that counts micro-batches itself and divides losses, on uneven ranks.

The engine steps after every `WINDOW` micro-batches, and would continue an incomplete window in the next epoch. So
*dummies*, empty batches, complete it on all ranks (`fill_window=True`). `loss_divided_by=` says that the engine divides
each loss. If it only sums gradients over ranks, call `join.scale(loss, divided_over=1)`.
"""

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

from joinables import Join
from joinables.testing import run_ranks

BATCHES = 2, 5, 0  # rank 2 has no data
WINDOW = 2  # the engine steps the optimizer after every second micro-batch
SAMPLES = torch.randn(3, 5, 8, 4, generator=torch.Generator().manual_seed(0))  # [rank, batch, sample, feature]


def loader_of(rank: int) -> list[torch.Tensor]:
    return [SAMPLES[rank, step, : 3 + step] for step in range(BATCHES[rank])]  # of different sizes


class Engine:
    """Small example of an engine."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.micro_batches = 0

    def backward(self, loss: torch.Tensor) -> None:
        (loss / WINDOW).backward()

    def step(self) -> None:
        self.micro_batches += 1
        if self.micro_batches % WINDOW == 0:
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            self.optimizer.step()
            self.optimizer.zero_grad()


def train(rank: int) -> Engine:
    engine = Engine()
    with Join([], process_group=None, loss_divided_by=WINDOW) as join:
        for x in join.iterate(loader_of(rank), weigh=len, window=WINDOW, fill_window=True):
            engine.backward(join.scale(mse_loss(engine.model(x), x.sum(1, keepdim=True))))
            engine.step()
    return engine


def train_in_one_process() -> Engine:
    engine = Engine()
    for at in range(0, max(BATCHES), WINDOW):
        x = torch.cat([batch for rank in range(3) for batch in loader_of(rank)[at : at + WINDOW]])
        engine.optimizer.zero_grad()
        mse_loss(engine.model(x), x.sum(1, keepdim=True)).backward()
        engine.optimizer.step()
    return engine


def compare(rank: int) -> None:
    ours = train(rank)
    pairs = zip(ours.model.parameters(), train_in_one_process().model.parameters(), strict=True)
    difference = max((a - b).abs().max().item() for a, b in pairs)
    if rank == 0:
        print(f"After {ours.micro_batches} micro-batches, parameters differ from one process's by {difference:.0e}.")
    assert difference < 1e-6, "an engine that counts must end where one process ends"


if __name__ == "__main__":
    run_ranks(compare, 3)

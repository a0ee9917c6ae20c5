"""Recipe: a contrastive loss (CLIP, SimCLR) over the features of all ranks, if some ranks have no rows.

Features are padded to the longest rank before they are gathered, and each row gets the gradients of all ranks. Dummies
must be empty: the rows of `dummy="last"` would count. Pass no `weigh=`: the loss is a mean over the rows of all ranks.
"""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, pad
from torch.nn.parallel import DistributedDataParallel

from joinables import Join
from joinables.testing import run_ranks

BATCHES = (2, 5, 0)  # rank 2 has no data
SAMPLES = torch.randn(3, 5, 8, 4, generator=torch.Generator().manual_seed(0))  # [rank, batch, sample, feature]


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own):
        rows = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, own)
        return tuple(rows)

    @staticmethod
    def backward(ctx, *gradients):
        total = torch.stack(gradients)
        dist.all_reduce(total)
        return total[dist.get_rank()]


def rows_of_all(features: torch.Tensor) -> torch.Tensor:
    counts = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([len(features)]))
    padded = pad(features, (0, 0, 0, int(max(counts)) - len(features)))
    return torch.cat([rows[: int(count)] for rows, count in zip(Gather.apply(padded), counts, strict=True)])


def loss_of(features: torch.Tensor) -> torch.Tensor:
    return cross_entropy(features @ features.T, torch.arange(len(features)))


def train(rank: int) -> torch.Tensor:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with Join([model, optimizer], divide_by_initial_world_size=False) as join:
        for x in join.iterate(SAMPLES[rank, : BATCHES[rank], : 4 + rank]):
            optimizer.zero_grad()
            join.scale(loss_of(rows_of_all(model(x)))).backward()  # each rank computes the same loss
            optimizer.step()
    return model.module.weight.detach()


def train_in_one_process() -> torch.Tensor:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(max(BATCHES)):
        x = torch.cat([SAMPLES[rank, step, : 4 + rank] for rank in range(3) if step < BATCHES[rank]])
        optimizer.zero_grad()
        loss_of(model(x)).backward()
        optimizer.step()
    return model.weight.detach()


def compare(rank: int) -> None:
    difference = (train(rank) - train_in_one_process()).abs().max().item()
    if rank == 0:
        print(f"Weights differ from those of one process by {difference:.0e}.")
    assert difference < 1e-6, "a contrastive loss on uneven ranks must be that of one process"


if __name__ == "__main__":
    run_ranks(compare, 3)

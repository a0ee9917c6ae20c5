"""Recipe: an optimizer that shards itself, such as Muon: each rank steps some matrices, and broadcasts them.

Step it on dummies, too: the other ranks wait for the parameters of this rank. After the loop no optimizer state is
copied, so each rank keeps the state of its own share, and saves it. In a plain block, ranks would wait for each other.
"""

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from joinables import Join
from joinables.testing import run_ranks

BATCHES = (2, 5, 0)  # rank 2 has no data, and steps its share of the matrices
SAMPLES = torch.randn(3, 5, 8, 4, generator=torch.Generator().manual_seed(0))  # [rank, batch, sample, feature]


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(wide, narrow, bias=False) for wide, narrow in ((4, 8), (8, 8), (8, 8), (8, 2))]
    return torch.nn.Sequential(layers[0], torch.nn.Tanh(), *layers[1:])


class Muon(torch.optim.Optimizer):
    def __init__(self, parameters, ranks: int = 1, rank: int = 0) -> None:
        super().__init__(parameters, {"lr": 0.02, "momentum": 0.9})
        self.ranks, self.rank = ranks, rank

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        for at, matrix in enumerate(group["params"]):
            if at % self.ranks == self.rank:  # in this rank's share
                momentum = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                update = momentum.mul_(group["momentum"]).add_(matrix.grad) / momentum.norm()
                for _ in range(5):  # Newton-Schulz iteration, towards the nearest orthogonal matrix
                    update = 1.5 * update - 0.5 * update @ update.T @ update
                matrix.sub_(update, alpha=group["lr"])
            if self.ranks > 1:
                dist.broadcast(matrix, src=at % self.ranks)


def train(rank: int) -> list[torch.Tensor]:
    model = DistributedDataParallel(make_model())
    optimizer = Muon(model.parameters(), dist.get_world_size(), rank)
    with Join([model, optimizer], divide_by_initial_world_size=False) as join:
        for x in join.iterate(SAMPLES[rank, : BATCHES[rank]]):
            optimizer.zero_grad()
            mse_loss(model(x), x[:, :2]).backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def train_in_one_process() -> list[torch.Tensor]:
    model = make_model()
    optimizer = Muon(model.parameters())
    for step in range(max(BATCHES)):
        x = torch.cat([SAMPLES[rank, step] for rank in range(3) if step < BATCHES[rank]])
        optimizer.zero_grad()
        mse_loss(model(x), x[:, :2]).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def compare(rank: int) -> None:
    pairs = zip(train(rank), train_in_one_process(), strict=True)
    difference = max((ours - expected).abs().max().item() for ours, expected in pairs)
    if rank == 0:
        print(f"Parameters differ from those of one process by {difference:.0e}.")
    assert difference < 1e-5, "an optimizer that shards itself must end where one process ends"


if __name__ == "__main__":
    run_ranks(compare, 3)

"""Tutorial 2: ZeroRedundancyOptimizer on uneven ranks, under torch's own Join and under this library's.

ZeRO assigns a shard of the parameters to each rank. The rank keeps the Adam state of its shard, steps the shard, and
broadcasts the new parameters. So a rank that is out of batches must still step its shard, on the gradients of the ranks
that have data. Under torch's Join, it steps on old gradients. Under this library's Join, it steps on the current ones.
"""

import textwrap

import torch
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

from joinables import Join, JoinError, ZeroStep
from joinables.testing import run_ranks

BATCHES = (2, 6, 0)  # rank 2 has no data, but it owns a shard, too
DATA = torch.randn(3, 6, 8, 4, generator=torch.Generator().manual_seed(0))  # [rank, batch, sample, feature]


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def train(rank: int, join: type, max_norm: float = torch.inf, passes_clip: bool = False) -> float:
    """Train one epoch and return the largest difference of a parameter from a single process."""
    model = DistributedDataParallel(make_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)

    def clip() -> None:
        clip_grad_norm_(model.parameters(), max_norm)

    step = ZeroStep(optimizer, transform_gradients=clip) if passes_clip else optimizer
    with join([model, step], divide_by_initial_world_size=False):
        for x in DATA[rank, : BATCHES[rank]]:
            optimizer.zero_grad()
            mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            clip()
            optimizer.step()
    return (parameters_to_vector(model.parameters()) - train_in_one_process(max_norm)).abs().max().item()


def train_in_one_process(max_norm: float) -> torch.Tensor:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)  # ZeRO shards Adam's state, and has the same results
    for i in range(max(BATCHES)):
        x = torch.cat([DATA[rank, i] for rank in range(3) if i < BATCHES[rank]])
        optimizer.zero_grad()
        mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return parameters_to_vector(model.parameters())


def compare(rank: int) -> None:
    torchs, ours, clipped = train(rank, TorchJoin), train(rank, Join), train(rank, Join, 0.5, passes_clip=True)
    try:
        train(rank, Join, max_norm=0.5)
    except JoinError as error:
        why = str(error)
    if rank == 0:
        print("After one epoch, the largest difference of a parameter to one process with plain Adam:\n")
        print(f"  {torchs:.0e}  torch's Join\n  {ours:.0e}  this library's Join\n")
        print("Now the loop clips gradients. A rank that has left the loop has to clip them, too:\n")
        print(f"  {clipped:.0e}  Join([model, ZeroStep(optimizer, transform_gradients=clip)])\n")
        print(f"With Join([model, optimizer]), the ranks end with an error:\n\n{textwrap.fill(why, 100)}")
    assert max(ours, clipped) < 1e-6, "ZeRO on uneven ranks must end where one process ends"


if __name__ == "__main__":
    run_ranks(compare, 3)

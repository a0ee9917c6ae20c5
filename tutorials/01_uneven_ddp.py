"""Tutorial 1: three ranks with different numbers of batches train one model.

DistributedDataParallel averages gradients across all ranks in every backward. If one rank runs out of batches first,
the other ranks wait in an all-reduce that this rank never calls. Inside a `Join` block, a rank that is out of data
leaves its loop, and *shadows* the other ranks until they are out of data, too. It issues the same collectives, and
contributes nothing to them. So no rank hangs, and the parameters equal the parameters of a single process.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

from joinables import Join

BATCHES = (2, 6, 0)  # per rank and epoch: rank 1 has the most batches, rank 2 has no data at all
EPOCHS = 2
DATA = torch.randn(3, 6, 8, 4, generator=torch.Generator().manual_seed(0))  # [rank, batch, sample, feature]


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def train(rank: int, store: str) -> None:
    """Train on one rank, in the loop that you have already. Only the line that begins with `with` is new."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 3), rank=rank, world_size=3)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(EPOCHS):
        # The optimizer is listed, too: a rank that is out of data early needs Adam's state in the next epoch.
        # Gradients have to be divided by the number of ranks that still have data, and not by three.
        with Join([model, optimizer], divide_by_initial_world_size=False) as join:
            for x in DATA[rank, : BATCHES[rank]]:
                optimizer.zero_grad()
                mse_loss(model(x), x.sum(1, keepdim=True)).backward()  # the model learns to add up 4 features
                optimizer.step()

    if rank == 0:
        print("The last epoch: `steps` counts a rank's own steps, `shadowed` those of others that it shadowed.\n")
        print(join.report, "\n")
    difference = (parameters_to_vector(model.parameters()) - train_in_one_process()).abs().max().item()
    print(
        f"Rank {rank} had {BATCHES[rank]} batches; its parameters differ from those of one process by {difference:.0e}."
    )
    assert difference < 1e-5, "uneven ranks must end where one process ends"
    dist.barrier()
    dist.destroy_process_group()


def train_in_one_process() -> torch.Tensor:
    """Train in a single process, which takes the i-th batches of all ranks as one batch."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(EPOCHS):
        for i in range(max(BATCHES)):
            x = torch.cat([DATA[rank, i] for rank in range(3) if i < BATCHES[rank]])
            optimizer.zero_grad()
            mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
    return parameters_to_vector(model.parameters())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(f"{folder}/store",), nprocs=3)
    print("\nSo no rank hung, and the model is the same as if the ranks had been even.")

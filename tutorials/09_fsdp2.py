"""Tutorial 9: FSDP2 (`fully_shard`) on uneven ranks.

`fully_shard` cuts every parameter into shards, one for each rank, and gathers them in forward and backward. If a rank
is out of batches, the other ranks wait for its shards in the middle of their forward. With `join.iterate`, all ranks
run the loop body equally often. A rank that is out of data runs the loop body on empty batches, called *dummies*. The
rank takes part in all collectives, such as the all-reduce of the gradient norm for clipping, and steps its own shards.
FSDP divides gradients by the number of all ranks. `join.scale(loss)` corrects this: gradients become the mean over the
ranks that have a batch.
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_

from joinables import Join
from joinables.testing import run_ranks

BATCHES = (2, 6, 0)  # rank 2 has no data, but it owns shards, too
DATA = torch.randn(3, 6, 8, 4, generator=torch.Generator().manual_seed(0))  # [rank, batch, sample, feature]
MAX_NORM = 0.5


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def train(rank: int) -> list[torch.Tensor]:
    """Train one epoch and return the whole parameters."""
    model = make_model()
    mesh = init_device_mesh("cpu", (3,))  # the device of the model; the default is a GPU, if the machine has one
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)  # of this rank's shards
    with Join([model, optimizer], divide_by_initial_world_size=False) as join:
        for x in join.iterate(DATA[rank, : BATCHES[rank]]):
            optimizer.zero_grad()
            loss = mse_loss(model(x), x.sum(1, keepdim=True))  # NaN on an empty dummy, but its gradients are 0
            join.scale(loss).backward()
            clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
    if rank == 0:
        print(join.report)
    return [parameter.full_tensor() for parameter in model.parameters()]


def train_in_one_process() -> list[torch.Tensor]:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for i in range(max(BATCHES)):
        x = torch.cat([DATA[rank, i] for rank in range(3) if i < BATCHES[rank]])
        optimizer.zero_grad()
        mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def compare(rank: int) -> None:
    pairs = zip(train(rank), train_in_one_process(), strict=True)
    difference = max((ours - expected).abs().max().item() for ours, expected in pairs)
    if rank == 0:
        print(f"\nAfter one epoch, parameters differ from those of one process by {difference:.0e}.")
    assert difference < 1e-6, "FSDP2 on uneven ranks must end where one process ends"


if __name__ == "__main__":
    run_ranks(compare, 3)

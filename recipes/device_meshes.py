"""Recipe: HSDP and tensor parallelism: meshes of two dimensions on uneven data.

Under HSDP, each rank has batches of its own. Under tensor parallelism, each layer is split over a pair of ranks, so
both ranks of the pair loop over the same batches. `Join` takes the process group from the mesh. Under DDP with tensor
parallelism, call `list(model.parameters())` before the first forward, and pass it to the optimizer: a forward replaces
the parameters of `model.parameters()` by new objects.
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss

from joinables import Join
from joinables.testing import run_ranks

BATCHES = {"HSDP": (2, 5, 0, 1), "tensor parallelism": (5, 0)}  # of each rank, or of each pair of ranks
SAMPLES = torch.randn(4, 5, 8, 4, generator=torch.Generator().manual_seed(0))  # [owner, batch, sample, feature]


def loader_of(how: str, owner: int) -> list[torch.Tensor]:
    return [SAMPLES[owner, step, : 3 + step] for step in range(BATCHES[how][owner])]  # of different sizes


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)]
    return torch.nn.Sequential(*layers)


def train(rank: int, how: str) -> torch.Tensor:
    """Train one epoch and return the predictions of the model."""
    model, owner = make_model(), rank
    if how == "HSDP":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
    else:
        mesh, owner = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor")), rank // 2
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with Join([model, optimizer]) as join:
        for x in join.iterate(loader_of(how, owner), weigh=len):
            optimizer.zero_grad()
            join.scale(mse_loss(model(x), x.sum(1, keepdim=True))).backward()
            optimizer.step()
    return model(SAMPLES[0, 0])


def train_in_one_process(how: str) -> torch.Tensor:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(max(BATCHES[how])):
        x = torch.cat([loader_of(how, owner)[step] for owner, count in enumerate(BATCHES[how]) if step < count])
        optimizer.zero_grad()
        mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
    return model(SAMPLES[0, 0])


def compare(rank: int) -> None:
    for how in BATCHES:
        difference = (train(rank, how) - train_in_one_process(how)).abs().max().item()
        if rank == 0:
            print(f"{how}: predictions differ from those of one process by {difference:.0e}.")
        assert difference < 1e-6, f"{how} must end where one process ends"


if __name__ == "__main__":
    run_ranks(compare, 4)

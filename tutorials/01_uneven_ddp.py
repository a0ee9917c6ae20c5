"""Tutorial 1: three ranks with different amounts of data train one model.

    python tutorials/01_uneven_ddp.py

DistributedDataParallel averages gradients in an all-reduce during each backward, and an all-reduce waits for all ranks.
A rank that runs out of batches never comes, so the others would wait for ever. In a `Join` block it comes: it leaves its
loop, and until everybody is done it takes part in the collectives of the others with nothing to say.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from join import Join

BATCHES = (2, 6, 0)  # per rank: rank 1 has the most, rank 2 has no data at all
EPOCHS = 2


def make_batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    inputs = [torch.randn(8, 4, generator=generator) for _ in range(BATCHES[rank])]
    return [(x, x.sum(1, keepdim=True)) for x in inputs]


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def train_on_rank(rank: int, store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, len(BATCHES)), rank=rank, world_size=len(BATCHES))
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(EPOCHS):
        # List what is trained: the optimizer too, since ranks that ran out early need its state in the next epoch.
        # divide_by_initial_world_size=False: average over the ranks that still have data, not over all three.
        with Join([model, optimizer], divide_by_initial_world_size=False) as join:
            for x, y in make_batches(rank):
                optimizer.zero_grad()
                mse_loss(model(x), y).backward()
                optimizer.step()

    if rank == 0:
        print(
            "What each rank did in the last epoch. `steps` are its own, `shadowed` those of others it took part in:\n"
        )
        print(join.report, "\n")
    expected = train_in_one_process()
    difference = max((p - q).abs().max().item() for p, q in zip(model.parameters(), expected.parameters(), strict=True))
    print(f"Rank {rank} had {BATCHES[rank]} batches; its parameters differ from one process's by {difference:.0e}.")
    assert difference < 1e-5, "uneven ranks must end where one process ends"
    dist.destroy_process_group()


def train_in_one_process() -> torch.nn.Module:
    """The same without any ranks: at step i, average the losses of the batches i that there are."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    shards = [make_batches(rank) for rank in range(len(BATCHES))]
    for _ in range(EPOCHS):
        for i in range(max(BATCHES)):
            losses = [mse_loss(model(shard[i][0]), shard[i][1]) for shard in shards if i < len(shard)]
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()
    return model


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train_on_rank, args=(f"{folder}/store",), nprocs=len(BATCHES))
    print("All ranks ended where one process ends, optimizer state included: the second epoch started from it.")

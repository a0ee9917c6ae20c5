"""Tutorial 2: ZeroRedundancyOptimizer on uneven ranks, under torch's own Join and under this one.

    python tutorials/02_zero.py

ZeRO gives each rank a shard of the parameters: it alone keeps their Adam state, steps them, and broadcasts the result.
So a rank that has run out of batches must go on stepping its shard, on the gradients of the ranks that still have some.
torch's Join steps it on the gradients that happen to lie around; this library's Join steps it on the true ones.
"""

import math
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from join import Join
from joinables import ZeroStep

BATCHES = (2, 6, 0)  # rank 2 has no data, but owns a shard like everybody else
DATA = torch.randn(3, 6, 8, 4, generator=torch.Generator().manual_seed(0))  # [rank, batch, sample, feature]


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return mse_loss(model(batch), batch.sum(1, keepdim=True))


def train(rank: int, join: type, max_norm: float = math.inf, tell: bool = False) -> float:
    """Train one epoch and return the largest difference of a parameter to one process."""
    model = DistributedDataParallel(make_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    step = ZeroStep(optimizer, lambda: clip_grad_norm_(model.parameters(), max_norm)) if tell else optimizer
    with join([model, step], divide_by_initial_world_size=False):
        for batch in DATA[rank, : BATCHES[rank]]:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
    pairs = zip(model.parameters(), train_in_one_process(max_norm).parameters(), strict=True)
    return max((ours - expected).abs().max().item() for ours, expected in pairs)


def train_in_one_process(max_norm: float) -> torch.nn.Module:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)  # ZeRO shards Adam, it does not change it
    for i in range(max(BATCHES)):
        optimizer.zero_grad()
        torch.stack([loss_of(model, DATA[rank, i]) for rank in range(3) if i < BATCHES[rank]]).mean().backward()
        clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return model


def compare(rank: int, store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, 3), rank=rank, world_size=3)
    torchs, ours = train(rank, TorchJoin), train(rank, Join)
    untold, told = train(rank, Join, max_norm=0.5), train(rank, Join, max_norm=0.5, tell=True)
    dist.destroy_process_group()
    if rank == 0:
        print("After one epoch, the largest difference of a parameter to one process with plain Adam:\n")
        print(f"  torch's Join         {torchs:.0e}\n  this library's Join  {ours:.0e}\n")
        print(
            "Now the loop clips gradients before each step. A rank that has left the loop cannot know, unless told:\n"
        )
        print(f"  Join([model, optimizer])                                   {untold:.0e}")
        print(f"  Join([model, ZeroStep(optimizer, transform_gradients=clip)])  {told:.0e}")
    assert ours < 1e-6 < 1e-3 < torchs, "only under this library's Join does ZeRO end where one process ends"
    assert told < 1e-6 < 1e-4 < untold, "with clipping it needs to be told"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(compare, args=(f"{folder}/store",), nprocs=3)

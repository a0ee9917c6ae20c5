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

from join import Join
from joinables import ZeroStep

BATCHES = (2, 6, 0)  # rank 2 has no data, but owns a shard like everybody else


def make_batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    inputs = [torch.randn(8, 4, generator=generator) for _ in range(BATCHES[rank])]
    return [(x, x.sum(1, keepdim=True)) for x in inputs]


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def difference(rank: int, join: type, max_norm: float = math.inf, tell: bool = False) -> float:
    """Train one epoch, clipping gradients; return how far the parameters end from those of one process."""
    model = DistributedDataParallel(make_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    step = ZeroStep(optimizer, transform_gradients=clip) if tell else optimizer
    with join([model, step], divide_by_initial_world_size=False):
        for x, y in make_batches(rank):
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            clip()
            optimizer.step()
    pairs = zip(model.parameters(), train_in_one_process(max_norm).parameters(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)


def train_in_one_process(max_norm: float) -> torch.nn.Module:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)  # ZeRO shards Adam, it does not change it
    shards = [make_batches(rank) for rank in range(len(BATCHES))]
    for i in range(max(BATCHES)):
        losses = [mse_loss(model(shard[i][0]), shard[i][1]) for shard in shards if i < len(shard)]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return model


def compare(rank: int, store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, len(BATCHES)), rank=rank, world_size=len(BATCHES))
    say = print if rank == 0 else lambda *_: None
    say("After one epoch, the largest difference of a parameter to one process with plain Adam:\n")
    say(f"  torch's Join                        {(torchs := difference(rank, TorchJoin)):.0e}")
    say(f"  this library's Join                 {(ours := difference(rank, Join)):.0e}")
    say("\nNow the loop clips gradients before each step, which a rank that is not in the loop cannot know:\n")
    say(f"  Join([model, optimizer])            {(untold := difference(rank, Join, max_norm=0.5)):.0e}")
    told = difference(rank, Join, max_norm=0.5, tell=True)
    say(f"  ZeroStep(transform_gradients=clip)  {told:.0e}")
    assert ours < 1e-6, "ZeRO on uneven ranks must end where one process ends"
    assert told < 1e-6, "and so it must with clipping, once ZeroStep is told"
    assert torchs > 1e-3, "under torch's Join the shards of early ranks are stepped on the wrong gradients"
    assert untold > 1e-4, "and under ours on unclipped ones, unless it is told"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(compare, args=(f"{folder}/store",), nprocs=len(BATCHES))

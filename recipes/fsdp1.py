"""Recipe: FSDP1 (`FullyShardedDataParallel`) on uneven ranks, with accumulation.

Each forward gathers parameters from all ranks. With `join.iterate`, all ranks run the loop body equally often. On an
empty dummy, `Join` runs the model on the rank's last batch, or on ones, and shortens its outputs. Only the last step of
a window reduces gradients: the others run in `no_sync`. `clip_grad_norm_` communicates, so call it on dummies, too.
"""

import contextlib

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.functional import mse_loss

from joinables import Join
from joinables.testing import run_ranks

BATCHES = (2, 5, 0)  # rank 2 has no data, but it owns shards, too
WINDOW = 2  # batches of each rank for one optimizer step
SAMPLES = torch.randn(3, 5, 8, 4, generator=torch.Generator().manual_seed(0))  # [rank, batch, sample, feature]


def loader_of(rank: int) -> list[torch.Tensor]:
    return [SAMPLES[rank, step, : 3 + 2 * step] for step in range(BATCHES[rank])]  # of different sizes


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def train(rank: int) -> list[torch.Tensor]:
    model = FullyShardedDataParallel(make_model(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with Join([model, optimizer]) as join:
        for x in join.iterate(loader_of(rank), weigh=len, window=WINDOW):
            with contextlib.nullcontext() if join.ends_window else model.no_sync():
                join.scale(mse_loss(model(x), x.sum(1, keepdim=True))).backward()
            if join.ends_window:
                model.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
    if rank == 0:
        print(join.report)
    with FullyShardedDataParallel.summon_full_params(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


def train_in_one_process() -> list[torch.Tensor]:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for at in range(0, max(BATCHES), WINDOW):
        x = torch.cat([batch for rank in range(3) for batch in loader_of(rank)[at : at + WINDOW]])
        optimizer.zero_grad()
        mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def compare(rank: int) -> None:
    pairs = zip(train(rank), train_in_one_process(), strict=True)
    difference = max((ours - expected).abs().max().item() for ours, expected in pairs)
    if rank == 0:
        print(f"\nParameters differ from those of one process by {difference:.0e}.")
    assert difference < 1e-6, "FSDP1 on uneven ranks must end where one process ends"


if __name__ == "__main__":
    run_ranks(compare, 3)

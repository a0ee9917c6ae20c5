"""Recipe: DeepSpeed (ZeRO 3) on uneven ranks, with accumulation.

The engine communicates itself, so the block lists nothing. DeepSpeed divides each loss by its accumulation steps, and
counts micro-batches: `loss_divided_by=` and `fill_window=True`. It clips to a norm of 1.0, unless the configuration has
`gradient_clipping`. Save after the last step of a window, with `join.loader_state()` of each rank. On a CPU, set
`DS_ACCELERATOR=cpu`: DeepSpeed compiles an extension, with ninja and a C++ compiler.
"""

import importlib.util
import os
import sys

import torch
from torch.nn.functional import mse_loss

from joinables import Join
from joinables.testing import run_ranks

BATCHES = (2, 5, 0)  # rank 2 has no data, but it owns shards, too
WINDOW = 2  # batches of each rank for one optimizer step
SAMPLES = torch.randn(3, 5, 8, 4, generator=torch.Generator().manual_seed(0))  # [rank, batch, sample, feature]
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": WINDOW,
    "gradient_clipping": 0.5,  # DeepSpeed 0.19 clips at 1.0 if this is missing
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,
}


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def train(rank: int) -> list[torch.Tensor]:
    import deepspeed

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    with Join([], process_group=None, loss_divided_by=WINDOW) as join:
        for x in join.iterate(SAMPLES[rank, : BATCHES[rank], : 4 + rank], weigh=len, window=WINDOW, fill_window=True):
            loss = mse_loss(engine(x), x.sum(1, keepdim=True))
            engine.backward(join.scale(loss))
            engine.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return [parameter.detach().clone() for parameter in engine.module.parameters()]


def train_in_one_process() -> list[torch.Tensor]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for at in range(0, max(BATCHES), WINDOW):
        steps = [(rank, step) for step in range(at, at + WINDOW) for rank in range(3) if step < BATCHES[rank]]
        x = torch.cat([SAMPLES[rank, step, : 4 + rank] for rank, step in steps])
        optimizer.zero_grad()
        mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def compare(rank: int) -> None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank), "LOCAL_SIZE": "3"}
    pairs = zip(train(rank), train_in_one_process(), strict=True)
    difference = max((ours - expected).abs().max().item() for ours, expected in pairs)
    if rank == 0:
        print(f"Parameters differ from those of one process by {difference:.0e}.")
    assert difference < 1e-6, "DeepSpeed on uneven ranks must end where one process ends"


if __name__ == "__main__":
    if importlib.util.find_spec("deepspeed") is None:
        sys.exit("This recipe needs DeepSpeed: pip install 'joinables[deepspeed]'")
    run_ranks(compare, 3, timeout=600)  # the first run compiles a part of DeepSpeed

"""Recipe: a loop that reduces gradients by hand, as Megatron's does, on uneven ranks.

`Join` cannot see how this loop reduces gradients. So the block lists nothing, and `join.scale` scales each loss so that
gradients become the mean over the samples of all ranks. Without it they are wrong, and no error says so. If gradients
are summed over ranks, and not divided, call `join.scale(loss, divided_over=1)`. Ranks that share one copy of the model
loop over the same batches. To accumulate, pass `window=k`, and reduce and step only `if join.ends_window`.
"""

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from joinables import Join
from joinables.testing import run_ranks

BATCHES = (2, 5, 0)  # rank 2 has no data
WINDOW = 2  # batches of each rank for one optimizer step
SAMPLES = torch.randn(3, 5, 8, 4, generator=torch.Generator().manual_seed(0))  # [rank, batch, sample, feature]


def loader_of(rank: int) -> list[torch.Tensor]:
    return [SAMPLES[rank, step, : 3 + step] for step in range(BATCHES[rank])]  # of different sizes


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def reduce_gradients(model: torch.nn.Module, divide: bool) -> None:
    """Sum all gradients over ranks in one all-reduce. With `divide`, divide the sums by the number of ranks."""
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = parameters_to_vector(gradients)
    dist.all_reduce(flat)
    vector_to_parameters(flat / dist.get_world_size() if divide else flat, gradients)


def train(rank: int, divide: bool) -> list[torch.Tensor]:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with Join([], process_group=None) as join:
        for x in join.iterate(loader_of(rank), weigh=len, window=WINDOW):
            loss = mse_loss(model(x), x.sum(1, keepdim=True))
            join.scale(loss, divided_over=None if divide else 1).backward()
            if join.ends_window:
                reduce_gradients(model, divide)
                optimizer.step()
                optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def train_in_one_process() -> list[torch.Tensor]:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for at in range(0, max(BATCHES), WINDOW):
        x = torch.cat([batch for rank in range(3) for batch in loader_of(rank)[at : at + WINDOW]])
        optimizer.zero_grad()
        mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def compare(rank: int) -> None:
    for divide in (True, False):
        pairs = zip(train(rank, divide), train_in_one_process(), strict=True)
        difference = max((ours - expected).abs().max().item() for ours, expected in pairs)
        if rank == 0:
            how = "divided" if divide else "summed"
            print(f"Gradients are {how}: parameters differ from those of one process by {difference:.0e}.")
        assert difference < 1e-6, "a loop that reduces by hand must end where one process ends"


if __name__ == "__main__":
    run_ranks(compare, 3)

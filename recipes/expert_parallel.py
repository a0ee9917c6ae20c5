"""Recipe: expert parallelism: each rank has one expert, and all ranks send rows to it in the middle of the forward.

On a dummy, a rank sends 0 rows, and its expert works for the other ranks. An expert's gradient is a sum over the rows
of all ranks, so all gradients are summed: `divided_over=1`. If DDP averages the other parameters, call
`join.scale(loss)`, and divide the experts' gradients by the number of ranks. `dummy="last"` would take places in
experts with a limited capacity, and a loss that balances the load must not count dummies.
"""

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.functional import mse_loss

from joinables import Join
from joinables.testing import run_ranks

BATCHES = (2, 5, 0)  # rank 2 has an expert and no data
SAMPLES = torch.randn(3, 5, 8, 4, generator=torch.Generator().manual_seed(0))  # [rank, batch, sample, feature]


class Mixture(torch.nn.Module):
    """Sends each row to one of three experts. This process holds the experts of the given numbers: one, or all."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, experts = torch.nn.Linear(4, 3), [torch.nn.Linear(4, 1) for _ in range(3)]
        self.experts = torch.nn.ModuleDict({str(number): experts[number] for number in numbers})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares, chosen = self.router(x).softmax(1).max(1)
        if len(self.experts) == 3:
            answers = torch.stack([expert(x) for expert in self.experts.values()])
            return shares.unsqueeze(1) * answers[chosen, torch.arange(len(x))]
        order, sent = chosen.argsort(), chosen.bincount(minlength=3)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        there, here = sent.tolist(), received.tolist()
        rows = all_to_all_single_autograd(x[order], here, there, dist.group.WORLD)
        (expert,) = self.experts.values()
        answers = all_to_all_single_autograd(expert(rows), there, here, dist.group.WORLD)
        return shares.unsqueeze(1) * answers[order.argsort()]


def train(rank: int) -> dict[str, torch.Tensor]:
    model = Mixture(rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with Join([], process_group=None) as join:
        for x in join.iterate(SAMPLES[rank, : BATCHES[rank], : 4 + rank], weigh=len):
            optimizer.zero_grad()
            join.scale(mse_loss(model(x), x.sum(1, keepdim=True)), divided_over=1).backward()
            for parameter in model.router.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
    return model.state_dict()


def train_in_one_process() -> dict[str, torch.Tensor]:
    model = Mixture(0, 1, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(max(BATCHES)):
        x = torch.cat([SAMPLES[rank, step, : 4 + rank] for rank in range(3) if step < BATCHES[rank]])
        optimizer.zero_grad()
        mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
    return model.state_dict()


def compare(rank: int) -> None:
    expected = train_in_one_process()
    difference = max((value - expected[name]).abs().max().item() for name, value in train(rank).items())
    if rank == 0:
        print(f"Parameters differ from those of one process by {difference:.0e}.")
    assert difference < 1e-6, "experts on uneven ranks must end where one process ends"


if __name__ == "__main__":
    run_ranks(compare, 3)

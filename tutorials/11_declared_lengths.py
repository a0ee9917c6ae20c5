"""Tutorial 11: ranks that know how many steps they will make, and say so.

In a `Join` block each step is announced by a header, since nobody knows who still has data. With `steps=n` everybody
knows from the start: the ranks exchange their numbers once, on entering, and no header is sent. What comes out is the
same. A number that turns out to be wrong ends the run on all ranks, with an error that says so.
"""

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

from join import Join, JoinReport, ProtocolError
from joinables.trainer import Launcher

BATCHES = (2, 6, 0)  # rank 2 has no data
DATA = torch.randn(3, 6, 8, 4, generator=torch.Generator().manual_seed(0))  # [rank, batch, sample, feature]


def train(steps: int | None) -> tuple[torch.Tensor, JoinReport]:
    """Train one epoch; `steps` is what this rank declares. All ranks declare, or none."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with Join([model, optimizer], divide_by_initial_world_size=False, steps=steps) as join:
        for x in DATA[rank, : BATCHES[rank]]:
            optimizer.zero_grad()
            mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
    return parameters_to_vector(model.parameters()).detach(), join.report


def compare() -> None:
    rank = dist.get_rank()
    announced, report = train(steps=None)
    declared, quiet_report = train(steps=BATCHES[rank])  # of a loader: steps=len(loader)
    difference = (announced - declared).abs().max().item()
    if rank == 0:
        print(
            f"Headers announce the steps:\n\n{report}\n\nThe steps are declared, and `headers` is 0:\n\n{quiet_report}"
        )
        print(f"\nThe largest difference of a parameter between the two: {difference:.0e}.\n")
    assert not any(row.headers for row in quiet_report.ranks)
    assert difference < 1e-6, "declared steps must not change what is trained"


def promise(promised: int) -> None:
    rank = dist.get_rank()
    train(steps=promised if rank == 1 else BATCHES[rank])  # rank 1 makes 6


def tells(promised: int) -> str:
    """What ends the run, in which rank 1 declares so many steps and makes 6."""
    try:
        Launcher(3).launch(promise, promised)
    except ProtocolError as error:
        return f"ProtocolError: {error}"
    return "nothing"


if __name__ == "__main__":
    Launcher(3).launch(compare)
    print("Rank 1 declares 5 steps, then 7, and makes 6. What ends the run:\n")
    for promised, mistake in ((5, "declared steps=5 and began step 6"), (7, "declared steps=7 and made 6")):
        told = tells(promised)
        print(f"  {told}")
        assert f"rank 1 {mistake}" in told
    print("\nSo declare steps where you know them, and a mistake is found by the first run.")

"""Tutorial 8: loops with collectives of their own, on uneven data, with `join.iterate`.

A rank that is out of data issues the collectives of the listed objects, but not the loop's own, such as an all-reduce
for a log. With `join.iterate`, the rank runs the loop body on *dummies*: empty batches that do not count in gradients.
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from joinables import Join
from joinables.testing import run_ranks

BATCHES = (2, 6, 0)  # rank 2 has no data
DATA = torch.randn(3, 6, 8, 4, generator=torch.Generator().manual_seed(0))  # [rank, batch, sample, feature]


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.scaler = torch.amp.GradScaler(device="cpu", init_scale=1024.0)
        self.ema = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def run(self, model: torch.nn.Module, loader: Iterable[torch.Tensor], log: Callable[[int, float], None]) -> None:
        """Run the loop that you have already, unchanged."""
        for x in loader:
            self.optimizer.zero_grad()
            loss = mse_loss(model(x), x.sum(1, keepdim=True))  # NaN on an empty dummy, but its gradients are 0
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.net.parameters(), 0.5)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.ema.update_parameters(self.net)
            log(len(x), loss.item())


def train(rank: int) -> None:
    mine = Training()
    model, state = DistributedDataParallel(mine.net), [mine.optimizer, mine.scheduler, mine.scaler, mine.ema]
    with Join([model, *state], divide_by_initial_world_size=False) as join:

        def log(samples: int, loss: float) -> None:
            total, losses = torch.tensor(samples), [torch.zeros(()) for _ in BATCHES]
            dist.all_reduce(total)  # a loop over the loader itself must not contain these two collectives
            dist.all_gather(losses, torch.tensor(loss))
            if rank == 0:  # `shadowing` is true if the batch of this rank is a dummy
                print(f"  {total:2} samples, losses {[f'{each:.2f}' for each in losses]}; shadowing: {join.shadowing}")

        mine.run(model, join.iterate(DATA[rank, : BATCHES[rank]]), log)
    with Join([model, *state]) as join:  # until="first": all ranks stop when one is out of data
        steps = sum(1 for _ in join.iterate(DATA[rank, : (4, 6, 2)[rank]], until="first"))
    dist.all_gather_object(ahead := [0, 0, 0], len(join.pending))  # batches that were read and not used
    alone = Training()  # in a single process, the i-th batches of all ranks are one batch
    joint = [torch.cat([DATA[r, i] for r in range(3) if i < BATCHES[r]]) for i in range(6)]
    alone.run(alone.net, joint, lambda samples, loss: None)
    of_mine, of_alone = (parameters_to_vector([*t.net.parameters(), *t.ema.parameters()]) for t in (mine, alone))
    off = (of_mine - of_alone).abs().max()
    assert off < 1e-5, "the loop must end where one process ends"
    if rank == 0:
        print(f"\nA single process differs by {off:.0e}. With until='first': {steps} steps; batches not used: {ahead}.")


if __name__ == "__main__":
    print("The log of rank 0; NaN is the loss of a rank that is out of data:\n")
    run_ranks(train, 3)

"""Tutorial 12: a rank is killed, torchrun starts all of them anew, and each sample of the epoch is still used once.

    torchrun --standalone --nproc-per-node 3 --max-restarts 3 tutorials/12_elastic.py FOLDER

A checkpoint says how many samples of the epoch all ranks have used together, and where the loader of each rank is. As
many ranks go on with their loaders. If there are fewer, or more, the samples that are left are dealt out anew. Either
way, the weights end as if nothing had happened, but for the rounding of sums over another number of ranks.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from join import Join
from joinables.trainer import UnevenDistributedSampler

GLOBAL_BATCH, EPOCHS, EVERY = 48, 2, 3


def train(folder: Path) -> torch.Tensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    data, size = TensorDataset(images[:1000].float() / 16, labels[:1000]), GLOBAL_BATCH // world_size
    sampler = UnevenDistributedSampler(data, shuffle=True, block_size=size)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    saved = {"epoch": 0, "start": 0, "used": 0, "loaders": []}
    if (folder / "last.pt").exists():
        saved = torch.load(folder / "last.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    for epoch in range(saved["epoch"], EPOCHS):
        loader = StatefulDataLoader(data, size, sampler=sampler)
        if epoch > saved["epoch"]:
            sampler.set_epoch(epoch)
        elif len(saved["loaders"]) == world_size:
            sampler.set_epoch(epoch, saved["start"])
            loader.load_state_dict(saved["loaders"][rank])
        else:
            sampler.set_epoch(epoch, saved["used"])
        used = saved["used"] if epoch == saved["epoch"] else 0
        with Join([model, optimizer]) as join:
            for step, (x, y) in enumerate(join.iterate(loader), 1):
                join.weight = len(x)
                optimizer.zero_grad()
                cross_entropy(model(x), y, reduction="sum" if not len(x) else "mean").backward()
                optimizer.step()
                used = min(used + GLOBAL_BATCH, len(data))
                states = [None] * world_size
                dist.all_gather_object(states, join.loader_state())
                state = {"epoch": epoch, "start": sampler.start, "used": used, "loaders": states}
                if rank == 0 and step % EVERY == 0:
                    state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(state, folder / "new.pt")
                    os.replace(folder / "new.pt", folder / "last.pt")
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    weights = train(Path(sys.argv[1]))
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, restart {os.environ['TORCHELASTIC_RESTART_COUNT']}: {weights.norm():.6f}")
    dist.barrier()
    dist.destroy_process_group()

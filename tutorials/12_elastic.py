"""Tutorial 12: a rank is killed, torchrun restarts all ranks, and each sample of an epoch is still used once.

    python tutorials/12_elastic.py
    torchrun --standalone --nproc-per-node 3 --max-restarts 1 tutorials/12_elastic.py FOLDER

A checkpoint says which samples all ranks have used. After a restart, the remaining samples are distributed over the new
ranks. The first command lets torchrun start the script on three ranks, and kills rank 1 in both attempts. Then it
starts the script on two ranks, which continue. The second command starts three ranks that keep their checkpoint in
FOLDER.
"""

import logging
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun
from torch.utils.data import DataLoader, TensorDataset

from joinables import Join
from joinables.trainer import Launcher, UnevenDistributedSampler

SAMPLES, GLOBAL_BATCH, EPOCHS = 970, 48, 2  # in the last step of an epoch rank 0 has 10 samples, and the others none


def train(path: str, kills: list[str]) -> None:
    rank, size = dist.get_rank(), GLOBAL_BATCH // dist.get_world_size()
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    data = TensorDataset(images[:SAMPLES].float() / 16, labels[:SAMPLES], torch.arange(SAMPLES))
    sampler = UnevenDistributedSampler(data, shuffle=True, block_size=size)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    used = torch.zeros(SAMPLES, dtype=torch.long)  # how often each sample was used
    if os.path.exists(path):
        used, weights, state = torch.load(path)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    for epoch in range(int(used.sum()) // SAMPLES, EPOCHS):
        sampler.set_epoch(epoch, start=int(used.sum()) % SAMPLES)
        with Join([model, optimizer]) as join:
            batches = join.iterate(DataLoader(data, size, sampler=sampler), weigh=lambda batch: len(batch[0]))
            for step, (x, y, numbers) in enumerate(batches, 1):
                optimizer.zero_grad()
                join.scale(torch.nn.functional.cross_entropy(model(x), y)).backward()
                optimizer.step()
                dist.all_reduce(counts := numbers.bincount(minlength=SAMPLES))  # zeros, if the rank has no data
                used += counts
                if rank == 0 and (step % 5 == 0 or join.is_last_step):
                    torch.save((used, model.state_dict(), optimizer.state_dict()), f"{path}.new")
                    os.replace(f"{path}.new", path)  # so a rank that is killed leaves a whole file
                if rank == 1 and f"{os.environ['TORCHELASTIC_RESTART_COUNT']}:{step}" in kills:
                    os.kill(os.getpid(), 9)  # SIGKILL: without an exception, like a lost machine


def launch(ranks: int, folder: str, *kills: str) -> tuple[torch.Tensor, dict[str, torch.Tensor], object]:
    settings = "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=1", "--redirects=3", f"--log-dir={folder}"
    torchrun([*settings, __file__, folder, *kills])
    return torch.load(f"{folder}/last.pt")


if __name__ == "__main__" and sys.argv[1:]:
    # The launcher makes the process group. docs/elastic.md says why a restart needs this.
    Launcher(int(os.environ["WORLD_SIZE"])).launch(train, f"{sys.argv[1]}/last.pt", sys.argv[2:])
elif __name__ == "__main__":
    logging.disable()  # torchrun logs each kill
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        try:
            raise AssertionError(f"rank 1 was to be killed: {launch(3, folder, '0:8', '1:18')}")
        except ChildFailedError:
            print(f"Rank 1 was killed twice. The checkpoint is of {torch.load(f'{folder}/last.pt')[0].sum()} samples.")
        (used, weights, _), (_, expected, _) = launch(2, folder), launch(1, other)
    difference = max((weights[name] - expected[name]).abs().max().item() for name in weights)
    print(f"Two went on: each sample was used {used.unique().tolist()} times, and weights differ by {difference:.0e}.")
    assert (used == EPOCHS).all() and difference < 1e-6

"""Recipe: tar files of samples, as webdataset reads them, distributed over ranks and the workers of their loaders.

Each tar file is a shard. Ranks get different numbers of shards, of different sizes. The samples of one shard have no
label and are skipped, so the rank with this shard has no batch. All other samples are used once. `join.weight` is the
size of a batch, and `join.scale` applies it to the loss. With webdataset itself, use `WebDataset(urls,
nodesplitter=split_by_node, shardshuffle=False, empty_check=False)` instead of `Shards`.
"""

import copy
import json
import tarfile
import tempfile
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from joinables import Join
from joinables.testing import run_ranks

WORLD_SIZE, WORKERS, BATCH_SIZE = 3, 2, 8
SHARDS = (40, 13, 9, 25, 30)  # samples of each; samples of shard 2, the only shard of rank 2, have no label


def write(folder: Path) -> None:
    torch.manual_seed(0)
    for shard, size in enumerate(SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number, x in enumerate(torch.randn(size, 6)):
                sample = {"x": x.tolist()} if shard == 2 else {"x": x.tolist(), "label": int(x.argmax())}
                (folder / "sample.json").write_text(json.dumps(sample))
                tar.add(folder / "sample.json", f"{number:04}.json")


class Shards(IterableDataset[tuple[torch.Tensor, int]]):
    def __init__(self, folder: Path, rank: int) -> None:
        self.files = sorted(folder.glob("*.tar"))[rank::WORLD_SIZE]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        for file in self.files[get_worker_info().id :: WORKERS]:
            with tarfile.open(file) as tar:
                samples = [json.load(tar.extractfile(entry)) for entry in tar]
            yield from ((torch.tensor(each["x"]), each["label"]) for each in samples if "label" in each)


def train(rank: int, folder: Path) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 6))
    model, alone = DistributedDataParallel(net), copy.deepcopy(net)
    optimizer, optimizer_alone = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (net, alone))
    loaders = [DataLoader(Shards(folder, r), BATCH_SIZE, num_workers=WORKERS) for r in range(WORLD_SIZE)]
    with Join([model, optimizer], divide_by_initial_world_size=False) as join:
        for x, y in loaders[rank]:
            join.weight = len(x)  # before the forward
            optimizer.zero_grad()
            join.scale(cross_entropy(model(x), y)).backward()
            optimizer.step()
    for batches in zip_longest(*loaders):  # in a single process, the i-th batches of all ranks are one batch
        x, y = map(torch.cat, zip(*filter(None, batches), strict=True))
        optimizer_alone.zero_grad()
        cross_entropy(alone(x), y).backward()
        optimizer_alone.step()
    difference = max((a - b).abs().max() for a, b in zip(net.parameters(), alone.parameters(), strict=True))
    if rank == 0:
        print(f"{join.report}\n\nParameters differ from those of one process by {difference:.0e}.")
    assert difference < 1e-6, "training on uneven shards must end where one process ends"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        run_ranks(train, WORLD_SIZE, Path(folder), start_method="fork")  # the workers of loaders are then forks, too

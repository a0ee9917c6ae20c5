"""The example of Ray's page: python -m tests.integrations.ray.page FOLDER

Each worker leaves in that folder what it ends with, by the data that it is trained on.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

from tests.examples import examples_of
from tests.integrations.ranks import imported
from tests.integrations.samples import BOTH, RANKS, SIZE, Data, Net, adam

TRAINED = BOTH[0], BOTH[-1]
"""An uneven data set, and streams of which one is empty; each takes Ray some ten seconds."""


@dataclass
class Loader:
    """The batches of the worker that iterates over them; of a map-style data set, as Ray prepares a loader."""

    data: Data

    def __iter__(self) -> Iterator[Any]:
        loader: Any = self.data.loader(dist.get_rank())
        if self.data.kind == "map":
            dataset = loader.dataset
            own = Subset(dataset, range(dist.get_rank(), len(dataset), dist.get_world_size()))
            prepare = imported("ray.train.torch").prepare_data_loader
            loader = prepare(DataLoader(own, SIZE), add_dist_sampler=False)
        return iter(loader)


def train_and_save(train: Callable[[Any], None], names: dict[str, Any], path: str, config: Any) -> None:
    """Train on each data from the start, with the objects that the example names."""
    torch.set_num_threads(1)
    net, optimizer, loader = names["net"], names["optimizer"], names["loader"]
    start = copy.deepcopy([net.state_dict(), optimizer.state_dict()])
    for number, loader.data in enumerate(TRAINED):
        for each, state in zip((net, optimizer), start, strict=True):
            each.load_state_dict(state)
        train(config)
        torch.save({"state": net.state_dict(), "seen": net.seen, "logged": []}, f"{path}/{number}-{dist.get_rank()}")
        net.seen.clear()


def main(folder: Path) -> None:
    """Run the example in Ray, once for all data: each start of workers takes Ray some 20 s of processor time."""
    ray, trains, theirs = imported("ray"), imported("ray.train"), imported("ray.train.torch")
    ray.init(
        num_cpus=RANKS + 1,
        include_dashboard=False,
        object_store_memory=80 * 2**20,  # bytes; the least that it takes
        _temp_dir=str(folder),
    )
    net = Net()
    names: dict[str, Any] = {"net": net, "optimizer": adam(net), "loader": Loader(TRAINED[0]), "loss_fn": mse_loss}

    def trainer(train: Callable[[Any], None], **options: Any) -> Any:
        return theirs.TorchTrainer(
            partial(train_and_save, train, names, str(folder)),
            torch_config=theirs.TorchConfig(backend="gloo"),
            run_config=trains.RunConfig(storage_path=str(folder / "results")),
            **options,
        )

    made = {"TorchTrainer": trainer, "ScalingConfig": trains.ScalingConfig}
    [example] = examples_of("frameworks/ray.md")
    assert example.name == "Uneven data under Ray Train"
    exec(example.code, {**names, **made, "DistributedDataParallel": DistributedDataParallel})
    ray.shutdown()


if __name__ == "__main__":
    from tests.integrations.ray.page import main as main_by_name  # what Ray sends by name, not by value

    main_by_name(Path(sys.argv[1]))

"""The example of Ray's page: python -m tests.integrations.ray.page FOLDER

Each worker leaves in that folder what it ends with, by the data that it is trained on.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
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


def train_and_save(train: Callable[[Any], None], net: Net, path: str, config: Any) -> None:
    torch.set_num_threads(1)
    train(config)
    torch.save({"state": net.state_dict(), "seen": net.seen, "logged": []}, f"{path}-{dist.get_rank()}")


def run(folder: Path, number: int, data: Data) -> None:
    """Run the example in Ray."""
    trains, theirs = imported("ray.train"), imported("ray.train.torch")
    net = Net()

    def trainer(train: Callable[[Any], None], **options: Any) -> Any:
        return theirs.TorchTrainer(
            partial(train_and_save, train, net, str(folder / str(number))),
            torch_config=theirs.TorchConfig(backend="gloo"),
            run_config=trains.RunConfig(storage_path=str(folder / "results")),
            **options,
        )

    names: dict[str, Any] = {"net": net, "optimizer": adam(net), "loader": Loader(data), "loss_fn": mse_loss}
    names |= {"TorchTrainer": trainer, "ScalingConfig": trains.ScalingConfig}
    [example] = [each for each in examples_of("frameworks/other.md") if each.name == "Ray Train"]
    exec(example.code, names | {"DistributedDataParallel": DistributedDataParallel})


def main(folder: Path) -> None:
    ray = imported("ray")
    ray.init(
        num_cpus=RANKS + 1,
        include_dashboard=False,
        object_store_memory=80 * 2**20,  # bytes; the least that it takes
        _temp_dir=str(folder),
    )
    for number, data in enumerate(TRAINED):
        run(folder, number, data)
    ray.shutdown()


if __name__ == "__main__":
    from tests.integrations.ray.page import main as main_by_name  # what Ray sends by name, not by value

    main_by_name(Path(sys.argv[1]))

"""What two workers train, whoever starts them: Ray, or torchrun.

    python -m tests.integrations.ray.training FOLDER

Each worker leaves in that folder what it ends with, by case.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from tests import training
from tests.integrations.ranks import imported
from tests.training import Case, Sharded

WORKERS = 2
NONE = (4, 0), (3, 0)  # batches by epoch and rank: one has no data at all
CASES = {
    "plain": Case(model="norm", counts=NONE),
    "iterate": Case(counts=NONE, iterate="empty", clip=True),
    "weighted, accumulates": Case(counts=((0, 4), (2, 4)), weighted=True, accumulate=2),
    "ZeRO": Case(counts=NONE, zero=True),
    "sharded": Sharded(counts=NONE),
}


def train(config: dict[str, str]) -> None:
    """What a worker does; it does not know who has started it."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    assert dist.get_world_size() == WORKERS
    states = {name: training.train(dist.get_rank(), case) for name, case in CASES.items()}
    torch.save(states, f"{config['folder']}/worker-{dist.get_rank()}")
    dist.barrier()


def with_ray(folder: str) -> None:
    ray, theirs, trainer = imported("ray"), imported("ray.train"), imported("ray.train.torch")
    ray.init(
        num_cpus=WORKERS + 1,
        include_dashboard=False,
        object_store_memory=80 * 2**20,  # bytes; the least that it takes
        _temp_dir=folder,
    )
    trainer.TorchTrainer(
        train,
        train_loop_config={"folder": folder},
        torch_config=trainer.TorchConfig(backend="gloo"),
        scaling_config=theirs.ScalingConfig(num_workers=WORKERS),
        run_config=theirs.RunConfig(storage_path=f"{folder}/results"),
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        train({"folder": sys.argv[1]})
        dist.destroy_process_group()
    else:
        from tests.integrations.ray.training import with_ray as with_ray_by_name  # what Ray sends by name, not by value

        with_ray_by_name(sys.argv[1])

"""What two workers train, whoever starts them: Ray, or torchrun.

    python -m tests.integrations.ray.training FOLDER

Each worker leaves in that folder what it ends with, by case. Under Ray they also train until one of them is killed,
twice, and go on where it was. All of this is one call of ``fit``, since each takes Ray some 20 s of processor time.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests import training
from tests.integrations.ranks import imported
from tests.joinables.trainer.elastic import WORK, Kill
from tests.training import Case, Data, Loop, Model, Optimizer, Shards, Step

WORKERS = 2
NONE = (4, 0), (3, 0)  # batches by epoch and rank: one has no data at all
CASES = {
    "plain": Case(Model("norm"), data=Data(NONE)),
    "iterate": Case(data=Data(NONE), loop=Loop(iterate="empty"), step=Step(clip=True)),
    "weighted, accumulates": Case(data=Data(((0, 4), (2, 4)), weighted=True), step=Step(accumulate=2)),
    "ZeRO": Case(optimizer=Optimizer(zero=True), data=Data(NONE)),
    "sharded": Case(wrapper=Shards(), data=Data(NONE), loop=Loop(iterate="empty")),
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


def train_and_be_killed(config: dict[str, str]) -> None:
    """Run each work until it is done, in as many attempts as it takes. The last work destroys the process group."""
    folder, rank = Path(config["folder"]), dist.get_rank()
    is_done = (folder / f"worker-{rank}").exists()
    for work in reversed(WORK):
        if not (folder / work / f"end-{rank}").exists():
            (folder / work).mkdir(exist_ok=True)
            WORK[work](folder / work, (Kill(3, 1, is_over=True),))
        if not is_done:
            train(config)
            is_done = True


def with_ray(folder: str) -> None:
    ray, theirs, trainer = imported("ray"), imported("ray.train"), imported("ray.train.torch")
    ray.init(
        num_cpus=WORKERS + 1,
        include_dashboard=False,
        object_store_memory=80 * 2**20,  # bytes; the least that it takes
        _temp_dir=folder,
    )
    trainer.TorchTrainer(
        train_and_be_killed,
        train_loop_config={"folder": folder},
        torch_config=trainer.TorchConfig(backend="gloo"),
        scaling_config=theirs.ScalingConfig(num_workers=WORKERS),
        run_config=theirs.RunConfig(
            storage_path=f"{folder}/results", failure_config=theirs.FailureConfig(max_failures=len(WORK))
        ),
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        train({"folder": sys.argv[1]})
        dist.destroy_process_group()
    else:
        from tests.integrations.ray.training import with_ray as with_ray_by_name  # what Ray sends by name, not by value

        with_ray_by_name(sys.argv[1])

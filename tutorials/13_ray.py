"""Tutorial 13: one function under Ray's TorchTrainer and under torchrun, with a worker that has no data.

    python tutorials/13_ray.py
    torchrun --standalone --nproc-per-node 2 tutorials/13_ray.py FOLDER

Ray starts the workers and makes their process group. The function is the same as without Ray. Workers with uneven data
need the `Join` block under Ray, too. This tutorial needs Ray: pip install '.[ray]', in the clone.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from joinables import Join


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return 60 batches for rank 0, and none for other ranks."""
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    all_of_them = list(zip((images.float() / 16)[:960].split(16), labels[:960].split(16), strict=True))
    return all_of_them if rank == 0 else []


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for x, y in batches(rank):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()


def train(config: dict[str, str]) -> None:
    """Train on one worker, under Ray or under torchrun."""
    if not dist.is_initialized():  # Ray has made the process group already
        dist.init_process_group("gloo")
    net, optimizer = model_and_optimizer()
    model = DistributedDataParallel(net)  # ray.train.torch.prepare_model(net) does the same
    with Join([model, optimizer], divide_by_initial_world_size=False):
        steps(model, optimizer, dist.get_rank())
    torch.save(net.state_dict(), f"{config['folder']}/rank-{dist.get_rank()}.pt")
    dist.barrier()


def with_ray(folder: str) -> None:
    try:
        import ray
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer
    except ImportError:
        sys.exit("This tutorial needs Ray: pip install '.[ray]', in the clone")
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR", _temp_dir=folder)
    how = {"run_config": RunConfig(storage_path=folder), "torch_config": TorchConfig(backend="gloo")}
    TorchTrainer(train, train_loop_config={"folder": folder}, scaling_config=ScalingConfig(num_workers=2), **how).fit()
    ray.shutdown()


if __name__ == "__main__" and "TORCHELASTIC_RUN_ID" in os.environ:
    train({"folder": sys.argv[1]})
    dist.destroy_process_group()
elif __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        with_ray(folder)
        found = [torch.load(f"{folder}/rank-{rank}.pt") for rank in range(2)]
    steps(*(alone := model_and_optimizer()), 0)
    expected = alone[0].state_dict()
    difference = max((state[name] - expected[name]).abs().max() for state in found for name in expected)
    print(f"Two workers of Ray, one of them without data, differ from one process by {difference:.0e}.")

"""Recipe: evaluate an FSDP2 model (`fully_shard`) on shards of a data set that have different lengths.

Every forward of a sharded model gathers parameters from all ranks. A rank with more batches would wait in its last
forwards for ranks that have left their loops. With `join.iterate`, all ranks run the loop body equally often. A rank
that is out of data runs the loop body on empty batches, called *dummies*, which add 0 to the sums. The block lists
nothing, because nothing is trained. If the model cannot take an empty batch, list it: `Join([model])`.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset

from joinables import Join
from joinables.testing import run_ranks

WORLD_SIZE, BATCH_SIZE = 3, 16
SHARDS = (70, 130, 0)  # samples of each rank; rank 2 has none
GENERATOR = torch.Generator().manual_seed(0)
SAMPLES = torch.randn(sum(SHARDS), 10, 8, generator=GENERATOR)  # [sample, position, feature]
DATASET = TensorDataset(SAMPLES, SAMPLES.mean((1, 2)).gt(0).long())


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=32, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
    return torch.nn.Sequential(encoder, torch.nn.Flatten(), torch.nn.Linear(80, 2)).eval()


def loader_of(rank: int) -> Iterable[list[torch.Tensor]]:
    start = sum(SHARDS[:rank])
    return DataLoader(Subset(DATASET, range(start, start + SHARDS[rank])), BATCH_SIZE)


@torch.no_grad()
def sums_of(model: torch.nn.Module, loader: Iterable[list[torch.Tensor]]) -> torch.Tensor:
    """Return the sum of losses and the numbers of right answers and samples, by the loop that you have already."""
    sums = torch.zeros(3, dtype=torch.float64)
    for x, y in loader:
        logits = model(x)  # an empty dummy has no logits, and adds 0 to the sums
        right = logits.argmax(1) == y
        sums += torch.tensor([cross_entropy(logits, y, reduction="sum"), right.sum(), len(y)])
    return sums


def evaluate(rank: int) -> None:
    model = make_model()
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in model[0].layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    with Join([], process_group=None) as join:  # pass the group of the model's mesh; None is the default group
        sums = sums_of(model, join.iterate(loader_of(rank)))
    dist.all_reduce(sums)  # after the block

    alone = sum(sums_of(make_model(), loader_of(each)) for each in range(WORLD_SIZE))
    difference = (sums - alone).abs().max()
    if rank == 0:
        loss, right, count = sums.tolist()
        print(join.report)
        print(f"\n{count:.0f} samples: mean loss {loss / count:.4f}, {right / count:.1%} right.")
        print(f"Sums of all ranks differ from those of one process by {difference:.0e}.")
    assert sums[2] == sum(SHARDS), "every sample counts once"
    assert difference < 1e-4, "an evaluation on uneven shards must be that of one process"


if __name__ == "__main__":
    run_ranks(evaluate, WORLD_SIZE)

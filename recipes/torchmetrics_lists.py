"""Recipe: torchmetrics metrics that keep all predictions in lists, on ranks with different numbers of batches.

The area under a curve, or a retrieval metric, needs all predictions. Without `Join`, `compute()` gathers the lists, and
a rank that never called `update` sends an empty tensor of floats: gloo aborts if the others send another dtype. A
`Join` block that lists metrics merges their predictions when the block ends.
"""

import warnings

import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision
from torchmetrics.retrieval import RetrievalMAP

from joinables import Join
from joinables.testing import run_ranks

WORLD_SIZE, BATCHES = 3, (3, 7, 0)  # rank 2 has no data
GENERATOR = torch.Generator().manual_seed(0)
SAMPLES = torch.randn(WORLD_SIZE, 7, 12, 4, generator=GENERATOR)  # [rank, batch, sample, feature]
CLICKED = (SAMPLES.sum(3) + 2 * torch.randn(WORLD_SIZE, 7, 12, generator=GENERATOR) > 0).long()
QUERY = torch.randint(5, CLICKED.shape, generator=GENERATOR)  # the query that has found the sample
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Flatten(0))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.3)
        self.curves = MetricCollection([BinaryAUROC(), BinaryAveragePrecision()])
        self.retrieval = RetrievalMAP()

    def step(self, model: torch.nn.Module, samples: torch.Tensor, clicked: torch.Tensor, query: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        logits = model(samples)
        binary_cross_entropy_with_logits(logits, clicked.float()).backward()
        self.optimizer.step()
        self.curves.update(logits.detach(), clicked)
        self.retrieval.update(logits.detach(), clicked, indexes=query)

    def values(self) -> list[float]:
        return [value.item() for value in (*self.curves.compute().values(), self.retrieval.compute())]


def batches_of(rank: int) -> list[Batch]:
    return list(zip(SAMPLES[rank], CLICKED[rank], QUERY[rank], strict=True))[: BATCHES[rank]]


def train(rank: int) -> None:
    mine, alone = Training(), Training()
    model = DistributedDataParallel(mine.net)
    with Join([model, mine.optimizer, mine.curves, mine.retrieval], divide_by_initial_world_size=False):
        for batch in batches_of(rank):
            mine.step(model, *batch)
    dist.barrier()
    dist.destroy_process_group()
    warnings.filterwarnings("ignore", "The ``compute`` method")  # torchmetrics warns on a rank without data
    for i in range(max(BATCHES)):
        present = [batches_of(r)[i] for r in range(WORLD_SIZE) if i < BATCHES[r]]
        alone.step(alone.net, *[torch.cat(each) for each in zip(*present, strict=True)])
    difference = max(abs(ours - expected) for ours, expected in zip(mine.values(), alone.values(), strict=True))
    if rank == 1:
        print(f"Of all ranks' samples: {', '.join(f'{value:.3f}' for value in mine.values())}.")
        print(f"They differ from those of one process by {difference:.0e} at most.")
    assert difference < 1e-6, "metrics must be those of one process"


if __name__ == "__main__":
    run_ranks(train, WORLD_SIZE)

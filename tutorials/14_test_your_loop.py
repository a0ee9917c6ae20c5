"""Tutorial 14: test that your own loop is exact, and find a bug.

`assert_equals_one_process` trains twice: on ranks with different numbers of batches, and on a single process, whose
batches are those of all ranks together. It then compares the results. If the training is a generator that yields its
results after each step, the error names the first step that differs.

The data set of this tutorial has 59 samples, so the last of its 8 batches has only 3 samples instead of 8. The loop
takes the mean loss of each batch, as most loops do. The test finds out when this is wrong.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from joinables import Join
from joinables.testing import NotExact, assert_equals_one_process

DATA = torch.randn(59, 4, generator=torch.Generator().manual_seed(0))
BATCHES = list(DATA.split(8))
COUNTS = [(5, 0, 3), (4, 0, 4)]  # two ways to distribute the 8 batches over three ranks; rank 1 has no data


def train(loader: list[torch.Tensor], rank: int, world_size: int, weigh: bool) -> Iterator[Any]:
    """Run the training loop on one rank. The single process calls it with `world_size=1`."""
    layers = torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with Join([model, optimizer], divide_by_initial_world_size=False) as join:
        for x in loader:
            if weigh:
                join.weight = len(x)
            optimizer.zero_grad()
            join.scale(mse_loss(model(x), x.sum(1, keepdim=True))).backward()  # without a weight, the loss as it is
            optimizer.step()
            yield model.module.state_dict()
    return {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}


def check(counts: tuple[int, ...], weigh: bool) -> str:
    """Return the verdict of the test. In a test of your own, call only `assert_equals_one_process`."""
    try:
        # Forked processes start fast. In a test, start_method="spawn", the default, always works.
        assert_equals_one_process(partial(train, weigh=weigh), BATCHES, [counts], start_method="fork")
    except NotExact as error:
        first, *_, last = str(error).splitlines()
        return f"{first.partition('. ')[0]}.\n             {last}"
    return "exact."


if __name__ == "__main__":
    print("The mean of each batch:\n")
    verdicts = [check(counts, weigh=False) for counts in COUNTS]
    for counts, verdict in zip(COUNTS, verdicts, strict=True):
        print(f"  {counts}: {verdict}")
    # With 5 batches on rank 0, the small batch is alone in the last step. With 4 batches on each rank, it meets a batch
    # of 8 samples in step 4. There, each of its 3 samples counts as much as 2.7 samples of the other batch.
    assert verdicts[0] == "exact." and "after step 4" in verdicts[1]
    print("\nThe same loop with join.weight = len(x):\n")
    for counts in COUNTS:
        verdict = check(counts, weigh=True)
        print(f"  {counts}: {verdict}")
        assert verdict == "exact."

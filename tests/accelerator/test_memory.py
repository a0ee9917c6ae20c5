"""How much memory of the device the library takes, beside what the model and its optimizer hold."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from join import Join, transfer
from tests.accelerator.target import Target, device_of_rank, memory_of
from tests.harness import Pool

SIZE = 512
COUNTS = 3, 4, 4
LAYERS = 4
CHUNK = 4 * SIZE * SIZE  # bytes: a layer's weight


def train(rank: int, target: Target) -> int:
    """How many bytes were held at most while the block ended, beyond those that were held before that."""
    device, memory = device_of_rank(target), memory_of(target)
    transfer.CHUNK_BYTES = CHUNK  # of 64 MiB, all of this would be one
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)))
    model = DistributedDataParallel(layers.to(device))
    optimizer = torch.optim.Adam(model.parameters())
    with Join([model, optimizer]):
        for _ in range(COUNTS[rank]):
            optimizer.zero_grad()
            model(torch.ones(4, SIZE, device=device)).square().mean().backward()
            optimizer.step()
        memory.reset_peak_memory_stats(device)
        before = memory.memory_allocated(device)
    return memory.max_memory_allocated(device) - before


def test_end_of_an_uneven_block(target: Target, accelerator_pool: Pool) -> None:
    """The first rank gets the state of one that made all steps: 12 chunks, of which no rank needs all at once."""
    extra = accelerator_pool.run(train, target, ranks=target.ranks(len(COUNTS)), backend=target.backend)
    # One, and some that a thread of the backend may not have freed yet.
    assert max(extra) <= 4.1 * CHUNK, [f"{each / CHUNK:.1f} chunks" for each in extra]


def hold(rank: int, target: Target) -> tuple[int, int, int]:
    device, memory = device_of_rank(target), memory_of(target)
    memory.reset_peak_memory_stats(device)
    before = memory.memory_allocated(device)
    kept = torch.ones(SIZE, SIZE, device=device)
    del kept
    torch.ones(SIZE, device=device)
    after = memory.memory_allocated(device)
    peak = memory.max_memory_allocated(device)
    memory.reset_peak_memory_stats(device)
    return after - before, peak - before, memory.max_memory_allocated(device) - before


def test_memory_is_counted(target: Target, accelerator_pool: Pool) -> None:
    assert accelerator_pool.run(hold, target, ranks=1, backend=target.backend) == [(0, CHUNK, 0)]

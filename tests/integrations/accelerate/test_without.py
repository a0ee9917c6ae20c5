"""What Accelerate's own ``join_uneven_inputs`` does on the CPU, and its loaders; the README tells it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.harness import Pool
from tests.integrations.ranks import accelerator, launched
from tests.training import build

pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install joinables[accelerate]")


def read(rank: int) -> tuple[list[float], list[str]]:
    """What a rank reads of a data set of 5 samples, and what it is told."""
    with launched():
        accelerate = accelerator()
        model, loader = accelerate.prepare(build("mlp"), DataLoader(TensorDataset(torch.arange(5.0)), batch_size=1))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with accelerate.join_uneven_inputs([model]):
                found = [sample.item() for (samples,) in loader for sample in samples]
        return found, [str(each.message) for each in told]


def test_samples_are_repeated_and_nobody_joins(pool: Pool) -> None:
    results = pool.run(read, ranks=2)
    found = sorted(sample for samples, _ in results for sample in samples)
    assert len(found) == 6
    assert set(found) == {0.0, 1.0, 2.0, 3.0, 4.0}
    for _, told in results:
        assert any("only supported for multi-GPU" in text for text in told), told

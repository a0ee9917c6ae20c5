"""What Lightning does with uneven ranks by itself; the README tells it."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning", reason="needs the extra lightning: make test-frameworks")

from torch.utils.data import DataLoader, TensorDataset

from tests.ending import Ending
from tests.integrations.lightning.training import Case, Counting, Module, loader_of, quiet, torch, trainer_of


def deal(rank: int) -> list[int]:
    quiet(rank)
    module = Counting(Case())
    trainer_of(Case(epochs=1), strategy="ddp").fit(module, DataLoader(TensorDataset(torch.arange(7.0)), 2))
    return module.seen


def test_its_sampler_repeats_a_sample(ending: Ending) -> None:
    found = [sample for seen in ending.run(deal, ranks=2) for sample in seen]
    assert (len(found), len(set(found))) == (8, 7)


def stream(rank: int) -> None:
    quiet(rank)
    trainer_of(Case(epochs=1), strategy="ddp").fit(Module(Case()), loader_of("stream", rank, (2, 5)[rank]))


def test_a_longer_stream_is_not_trained_to_its_end(ending: Ending) -> None:
    """The rank that has more batches waits in a backward, or breaks there once the other's process has ended."""
    ends = ending.ends(stream, ranks=2, limit=20)
    assert ends[1].code != 0, ends

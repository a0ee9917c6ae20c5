"""Means are over samples, whatever a batch looks like."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from typing_extensions import override

from joinables.trainer import TrainModule
from joinables.trainer.data import SampleCounter
from tests.harness import Pool
from tests.joinables.trainer.modules import FEATURES, dataset
from tests.joinables.trainer.ranks import trainer
from tests.training import TOLERANCE, assert_same, flat_state


class Graphs:
    """A batch as an object of the user's own."""

    def __init__(self, items: list[Any]) -> None:
        self.x, self.y = (torch.stack([item[part] for item in items]) for part in (0, 1))

    def to(self, *to: Any) -> Graphs:
        self.x = self.x.to(*to)
        return self

    def __len__(self) -> int:
        return len(self.x)


def time_major(items: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.stack([x for x, _ in items], 1)
    return x[:, :, None], torch.stack([y for _, y in items])


class Fits(TrainModule):
    """Trains on any of these batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(FEATURES, 3)
        self.batch_size = 7  # pyright: ignore  # as LightningModules have it; not a count

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = (batch.x, batch.y) if isinstance(batch, Graphs) else (batch[0][:, :, 0].T, batch[1])
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Counts(Fits):
    """Counts by itself, in batches that have no known length."""

    @override
    def batch_size(self, batch: Any) -> int:  # pyright: ignore
        return len(batch[1])


def fits(rank: int, kind: Any, collate: Any, samples: int, ranks: int, streams: bool) -> Any:
    module, run = kind(), trainer(max_epochs=2)
    data: Any = DataLoader(dataset(samples), 8 // ranks, collate_fn=collate)
    run.fit(module, list(data)[rank::ranks] if streams else data)
    return (
        flat_state(module.state_dict()),
        torch.tensor(run.callback_metrics["loss"]),
        run.validate(module, data)[0]["loss"],
    )


@pytest.mark.parametrize(
    ("kind", "collate", "streams"),
    [(Fits, time_major, False), (Fits, Graphs, False), (Counts, time_major, True)],
)
@pytest.mark.parametrize("samples", [29, 3])  # the last is one batch: a rank has no data
def test_two_ranks_equal_one(pool: Pool, kind: Any, collate: Any, streams: bool, samples: int) -> None:
    state, loss, validated = fits(0, kind, collate, samples, 1, streams)
    for found in pool.run(fits, kind, collate, samples, 2, streams, ranks=2):
        assert_same(found[0], state, TOLERANCE)
        torch.testing.assert_close(found[1], loss)
        assert found[2] == pytest.approx(validated)


class Opaque:
    def to(self, device: torch.device) -> Opaque:
        return self


def test_a_count_that_nothing_shows() -> None:
    for batch in (Opaque(), (torch.tensor(3), object()), np.ones((5, 2)), "text", 3):
        with pytest.raises(TypeError, match=r"no tensor with rows.* batch_size\(self, batch\) in Fits.*\[J644\]"):
            SampleCounter(Fits(), [])(batch, 0)
    joined = DataLoader(dataset(8), 4, collate_fn=lambda items: torch.cat([x for x, _ in items]))
    with pytest.warns(UserWarning, match=r"another length than .* Define batch_size\(self, batch\) in Fits"):
        assert SampleCounter(Fits(), joined)(next(iter(joined)), 0) == 4 * FEATURES
    with pytest.warns(UserWarning, match="different lengths"):
        assert SampleCounter(Fits(), [])((torch.ones(5, 8), torch.ones(8)), 0) == 5

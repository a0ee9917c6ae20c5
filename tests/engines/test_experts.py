"""Expert parallelism: each rank has one expert, to which all ranks send rows, in the middle of the forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from join import Join
from tests.ending import Ending
from tests.engines.table import Cell, cells_of
from tests.engines.training import Engine, Feed, adam, alone, check
from tests.harness import Pool
from tests.training import FEATURES, TARGETS, flat_state

EXPERTS = 3


def expert(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()


class Mixture(nn.Module):
    """Each row goes to the expert that the router likes most, times how much it does."""

    def __init__(self, seed: int, experts: list[nn.Module]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)
        torch.manual_seed(seed)
        self.stem, self.head = nn.Linear(FEATURES, 8).double(), nn.Linear(8, TARGETS).double()
        self.router = nn.Linear(8, EXPERTS).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.stem(x))
        likes, chosen = self.router(hidden).softmax(1).max(1)
        return self.head(hidden + likes.unsqueeze(1) * self.ask(hidden, chosen))

    def ask(self, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """What the experts answer to each row."""
        answers = torch.zeros_like(rows)
        for at, each in enumerate(self.experts):
            answers[chosen == at] = each(rows[chosen == at])
        return answers


class SpreadMixture(Mixture):
    """The same, with one expert on each rank."""

    def ask(self, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        group: Any = dist.group.WORLD
        order = chosen.argsort()
        sent = chosen.bincount(minlength=EXPERTS)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        there, here = sent.tolist(), received.tolist()
        arrived = all_to_all_single_autograd(rows[order], here, there, group)
        answers = all_to_all_single_autograd(self.experts[0](arrived), there, here, group)
        return answers[order.argsort()]


class ExpertParallel(Engine):
    """Experts sum what the rows of all ranks give them; all other gradients are summed by hand: nobody divides."""

    def __init__(self, rank: int, cell: Cell, seed: int) -> None:
        super().__init__(rank, cell, seed)
        self.rank = rank
        self.model = SpreadMixture(seed, [expert(seed + rank)])
        self.optimizer = adam(self.model)
        self.listed = [self.model, self.optimizer] if cell.is_plain else []
        self.options: Any = {} if self.listed else {"process_group": None}

    @override
    def train(self, feed: Feed) -> None:
        with Join(self.listed, divide_by_initial_world_size=False, **self.options) as join:
            for x, y in feed.steps(join):
                join.scale(mse_loss(self.model(x), y), divided_over=1).backward()
                if join.ends_window:
                    for name, parameter in self.model.named_parameters():
                        if not name.startswith("experts."):
                            dist.all_reduce(parameter.grad)
                    self.optimizer.step()
                    self.optimizer.zero_grad()

    @override
    def state(self) -> dict[str, torch.Tensor]:
        """With its expert named as one process names it."""
        return flat_state(
            {name.replace("experts.0", f"experts.{self.rank}"): v for name, v in self.model.state_dict().items()}
        )


class ExpertParallelInDDP(ExpertParallel):
    """DDP averages all but the experts, whose gradients are the mean once they are divided as DDP's are."""

    def __init__(self, rank: int, cell: Cell, seed: int) -> None:
        super().__init__(rank, cell, seed)
        experts = [name for name, _ in self.model.named_parameters() if name.startswith("experts.")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.model, experts)
        self.ddp = DistributedDataParallel(self.model)

    @override
    def train(self, feed: Feed) -> None:
        with Join([self.ddp], divide_by_initial_world_size=False, timeout=self.cell.timeout) as join:
            for x, y in feed.steps(join):
                self.ddp.require_backward_grad_sync = join.ends_window
                join.scale(mse_loss(self.ddp(x), y)).backward()
                if join.ends_window:
                    for parameter in self.model.experts.parameters():
                        parameter.grad /= dist.get_world_size()
                    self.optimizer.step()
                    self.optimizer.zero_grad()


KINDS: dict[str, Any] = {"expert parallelism": ExpertParallel, "expert parallelism in DDP": ExpertParallelInDDP}


@pytest.mark.parametrize("cell", cells_of(*KINDS), ids=str)
def test_experts(pool: Pool, ending: Ending, cell: Cell) -> None:
    model = Mixture(0, [expert(each) for each in range(EXPERTS)])
    check(pool, ending, KINDS[cell.engine], cell, alone(cell, model))

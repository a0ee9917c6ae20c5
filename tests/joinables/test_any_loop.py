"""A loop with everything that loops have, collectives of its own among it, in lockstep: as one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from join import Join
from tests.models import TOLERANCE, assert_same, batch, build, flat_state
from tests.pool import Pool

COUNTS = ((0, 3, 1), (2, 0, 4), (3, 1, 0))


class Training:
    """A model and all that goes with it; ``net`` is what is trained, ``model`` what is called."""

    def __init__(self, net: torch.nn.Module, model: Any) -> None:
        self.net, self.model = net, model
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        # The first step runs over and is skipped.
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-60, growth_interval=3)
        self.ema = AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8))

    def backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(8 * loss).backward()

    def step(self) -> None:
        scale = self.scaler.get_scale()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scaler.get_scale() >= scale:
            self.scheduler.step()
        self.ema.update_parameters(self.net)

    def state(self, logged: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        states = [each.state_dict() for each in (self.net, self.optimizer, self.scheduler, self.scaler, self.ema)]
        return flat_state(*states, logged)


def train(rank: int) -> dict[str, torch.Tensor]:
    net = build("mlp")
    training = Training(net, DistributedDataParallel(net))
    listed = [training.model, training.optimizer, training.scheduler, training.scaler, training.ema]
    logged: list[torch.Tensor] = []
    for epoch, counts in enumerate(COUNTS):
        with Join(listed, divide_by_initial_world_size=False) as join:
            for x, y in join.iterate([batch(rank, epoch, step) for step in range(counts[rank])]):
                training.optimizer.zero_grad()
                loss = ((training.model(x) - y) ** 2).mean()
                training.backward(loss)
                training.step()
                total = torch.stack([loss.detach() * len(x), torch.tensor(float(len(x)))]).nan_to_num()
                dist.all_reduce(total)
                losses = [torch.empty(()) for _ in counts]
                dist.all_gather(losses, loss.detach().nan_to_num())
                logged += [total[0] / total[1], torch.stack(losses)]
    return training.state(logged)


def reference() -> dict[str, torch.Tensor]:
    net = build("mlp")
    training = Training(net, net)
    logged: list[torch.Tensor] = []
    for epoch, counts in enumerate(COUNTS):
        for step in range(max(counts)):
            training.optimizer.zero_grad()
            losses = torch.zeros(len(counts))
            ranks = [rank for rank, count in enumerate(counts) if count > step]
            for rank in ranks:
                x, y = batch(rank, epoch, step)
                loss = ((net(x) - y) ** 2).mean()
                training.backward(loss / len(ranks))
                losses[rank] = loss.detach()
            training.step()
            logged += [losses.sum() / len(ranks), losses]
    assert training.scheduler.last_epoch == sum(map(max, COUNTS)) - 1
    return training.state(logged)


def test_equals_one_process(pool: Pool) -> None:
    states = pool.run(train)
    for state in states[1:]:
        assert_same(states[0], state)
    assert_same(states[0], reference(), TOLERANCE)

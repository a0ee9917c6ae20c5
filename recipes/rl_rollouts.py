"""Recipe: reinforcement learning; each rank trains on the episodes that it has played itself.

Episodes have different lengths, so ranks have different numbers of actions, and of micro-batches. If all episodes of a
rank have won, or all have lost, the rank has no micro-batches. Each update is a loop over `join.iterate` with
`window="all"`. A micro-batch weighs its number of actions, so gradients are the mean over the actions of all ranks.
During roll-outs, call `model.module`. For several epochs over the same roll-outs, put a loop inside the block.
"""

from contextlib import nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel

from joinables import Join
from joinables.testing import run_ranks

WORLD_SIZE, UPDATES, EPISODES, MICRO_BATCH, LENGTH = 3, 6, 6, 32, 7


def make_policy() -> torch.nn.Module:
    torch.manual_seed(0)  # in double precision, so that rounding changes no drawn action
    return torch.nn.Sequential(torch.nn.Embedding(LENGTH, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2)).double()


@torch.no_grad()
def roll_out(policy: torch.nn.Module, update: int, rank: int) -> list[torch.Tensor]:
    """Walk in a corridor from its middle to an end; the right end wins. Return the actions, in micro-batches."""
    steps, wins, generator = [], [], torch.Generator().manual_seed(100 * update + rank)
    for episode in range(EPISODES):
        place = LENGTH // 2
        while 0 < place < LENGTH - 1:
            action = int(torch.multinomial(policy(torch.tensor(place)).softmax(0), 1, generator=generator))
            steps.append((place, action, episode))
            place += 2 * action - 1
        wins.append(float(place > 0))
    if len(set(wins)) == 1:
        return []
    steps = [(place, action, wins[episode] - sum(wins) / EPISODES) for place, action, episode in steps]
    return list(torch.tensor(steps, dtype=torch.float64).split(MICRO_BATCH))


def mean_loss(policy: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    places, actions, advantages = batch.unbind(1)
    log_probabilities = policy(places.long()).log_softmax(1).gather(1, actions.long()[:, None])[:, 0]
    return -(log_probabilities * advantages).mean()


def train(rank: int) -> None:
    policy, alone, numbers = make_policy(), make_policy(), []
    model = DistributedDataParallel(policy)
    optimizer, optimizer_alone = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (policy, alone))
    for update in range(UPDATES):
        batches = roll_out(policy, update, rank)  # the policy itself: DDP has no part in roll-outs
        optimizer.zero_grad()
        with Join([model, optimizer], divide_by_initial_world_size=False) as join:
            for batch in join.iterate(batches, weigh=len, window="all"):
                with nullcontext() if join.ends_window else model.no_sync():
                    join.scale(mean_loss(model, batch)).backward()
                if join.ends_window:
                    optimizer.step()
        everything = [roll_out(alone, update, each) for each in range(WORLD_SIZE)]  # the same in one process
        numbers.append([len(each) for each in everything])
        optimizer_alone.zero_grad()
        mean_loss(alone, torch.cat([batch for own in everything for batch in own])).backward()
        optimizer_alone.step()
    difference = max((a - b).abs().max() for a, b in zip(policy.parameters(), alone.parameters(), strict=True))
    if rank == 0:
        print(f"Micro-batches by update and rank: {numbers}. Off from one process by {difference:.0e}.")
    assert any(0 in each for each in numbers), "now and then, a rank has nothing to train on"
    assert difference < 1e-9, "updates must be those of one process"


if __name__ == "__main__":
    run_ranks(train, WORLD_SIZE)

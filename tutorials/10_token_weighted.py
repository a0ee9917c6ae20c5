"""Tutorial 10: a character model on sentences of unequal length, in which every character counts the same.

The loss of a batch is the mean over its real characters. DDP averages these means. So a character on a rank with short
sentences counts many times as much as a character on a rank with long ones. If you set `join.weight` to the number of
characters, and pass each loss through `join.scale`, gradients are the mean over all characters of all ranks.
"""

from itertools import zip_longest
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from torch.nn.utils.rnn import pad_sequence

from joinables import Join
from joinables.testing import run_ranks

TEXT = sorted((Path(__file__).parent / "data" / "harbour.txt").read_text().splitlines(), key=len)
ALPHABET = "\0" + "".join(sorted(set("".join(TEXT))))  # number 0 is padding


def batches(sentences: list[str]) -> list[torch.Tensor]:
    coded = [torch.tensor([ALPHABET.index(character) for character in sentence]) for sentence in sentences]
    return [pad_sequence(coded[i : i + 4], batch_first=True) for i in range(0, len(coded), 4)]  # [sentence, character]


BATCHES = [batches(TEXT[:28]), batches(TEXT[28:]), []]  # more sentences on rank 0, more characters on rank 1


def make_model() -> torch.nn.Module:
    """Return a model that guesses a character from the previous character."""
    torch.manual_seed(0)
    size = len(ALPHABET)
    return torch.nn.Sequential(torch.nn.Embedding(size, 16), torch.nn.Tanh(), torch.nn.Linear(16, size))


def mean_loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0)


def count(batch: torch.Tensor) -> int:
    return int((batch[:, 1:] != 0).sum())  # the characters that are guessed: not padding, and not a sentence's first


def train(rank: int, weighted: bool) -> torch.Tensor:
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with Join([model, optimizer], divide_by_initial_world_size=False) as join:
        for batch in BATCHES[rank]:
            join.weight = count(batch) if weighted else None  # before the forward
            optimizer.zero_grad()
            join.scale(mean_loss(model, batch)).backward()  # without a weight, the loss stays as it is
            optimizer.step()
    return parameters_to_vector(model.parameters())


def compare(rank: int) -> None:
    weighted, unweighted = train(rank, weighted=True), train(rank, weighted=False)
    model = make_model()  # in a single process, the i-th batches of all ranks are one batch with one mean
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for present in ([batch for batch in step if batch is not None] for step in zip_longest(*BATCHES)):
        optimizer.zero_grad()
        (sum(mean_loss(model, each) * count(each) for each in present) / sum(map(count, present))).backward()
        optimizer.step()
    exact, off = ((each - parameters_to_vector(model.parameters())).abs().max() for each in (weighted, unweighted))
    print(f"Rank {rank}: off from one process by {exact:.0e} with join.weight, by {off:.0e} without it.")
    assert exact < 1e-5 < 1e-2 < off, "every character must count the same"


if __name__ == "__main__":
    run_ranks(compare, 3)

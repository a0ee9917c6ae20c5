"""Recipe: a causal language model with accumulation, in which every token counts the same.

Ranks have different numbers of micro-batches, which have different numbers of tokens. `weigh=tokens` weighs a batch by
its tokens, and `join.scale` applies the weight to the loss: gradients are the mean over the tokens of all ranks in a
window. Do not divide the loss. `join.ends_window` is true in the last step of a window, even of a short one, at the
same step on all ranks, so the code below it may clip or communicate.
"""

from contextlib import nullcontext

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from joinables import Join
from joinables.testing import run_ranks

WORLD_SIZE, WINDOW, WORDS, PADDING = 3, 3, 32, 0
MICRO_BATCHES, LONGEST = (7, 4, 0), (8, 40, 5)  # by rank; rank 2 has no data


def data_of(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.randint(4, LONGEST[rank], (MICRO_BATCHES[rank], 4), generator=generator)
    texts = [[torch.randint(1, WORDS, (int(n),), generator=generator) for n in each] for each in lengths]
    return [torch.nn.utils.rnn.pad_sequence(each, batch_first=True) for each in texts]  # [text, token] each


def tokens(texts: torch.Tensor) -> int:
    return int((texts[:, 1:] != PADDING).sum())  # the first token of a text is not guessed


class Decoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = torch.nn.Embedding(WORDS, 16), torch.nn.Linear(16, WORDS)
        self.layer = torch.nn.TransformerEncoderLayer(16, nhead=2, dim_feedforward=32, dropout=0.0, batch_first=True)
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-4)  # a key's bias has only rounding

    def forward(self, texts: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over tokens."""
        mask = torch.nn.Transformer.generate_square_subsequent_mask(texts.shape[1] - 1)
        guesses = self.head(self.layer(self.words(texts[:, :-1]), src_mask=mask, is_causal=True))
        return cross_entropy(guesses.flatten(0, 1), texts[:, 1:].flatten(), ignore_index=PADDING)

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def train(rank: int) -> None:
    mine, alone = Decoder(), Decoder()
    model = DistributedDataParallel(mine)
    with Join([model, mine.optimizer], divide_by_initial_world_size=False) as join:
        for texts in join.iterate(data_of(rank), weigh=tokens, window=WINDOW):
            with nullcontext() if join.ends_window else model.no_sync():
                join.scale(model(texts)).backward()  # not divided by WINDOW
            if join.ends_window:
                mine.step()
    for start in range(0, max(MICRO_BATCHES), WINDOW):  # the same in a single process
        window = [texts for each in range(WORLD_SIZE) for texts in data_of(each)[start : start + WINDOW]]
        (sum(alone(texts) * tokens(texts) for texts in window) / sum(map(tokens, window))).backward()
        alone.step()
    difference = max((a - b).abs().max() for a, b in zip(mine.parameters(), alone.parameters(), strict=True))
    if rank == 0:
        print(f"{join.report}\n\nParameters differ from those of one process by {difference:.0e}.")
    assert difference < 1e-5, "every token must count the same"


if __name__ == "__main__":
    run_ranks(train, WORLD_SIZE)

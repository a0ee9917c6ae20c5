"""A character language model with ZeRO and accumulation, which resumes on any number of processes.

    python tests/projects/characters.py FOLDER PROCESSES

After a crash, start it again with the same folder, on any number of processes.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from joinables.trainer import CSVLogger, ModelCheckpoint, Trainer, TrainModule

TEXT = (Path(__file__).parents[2] / "tutorials" / "data" / "harbour.txt").read_text()
LETTERS = sorted(set(TEXT))
GLOBAL_BATCH, ACCUMULATED, EPOCHS = 12, 2, 3


class Lines(Dataset):
    """Parts of the text, each with the letters that follow."""

    def __init__(self, samples: int = 170, length: int = 32) -> None:
        codes = torch.tensor([LETTERS.index(letter) for letter in TEXT])
        self.parts = codes.unfold(0, length + 1, 16)[:samples]

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.parts[index, :-1], self.parts[index, 1:]


class CharacterModel(TrainModule):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hparams = {"width": width}
        self.embedding = nn.Embedding(len(LETTERS), width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, len(LETTERS))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.memory(self.embedding(text))[0])

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        text, following = batch
        loss = cross_entropy(self(text).flatten(0, 1), following.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=25)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main(folder: Path, processes: int) -> None:
    model, last = CharacterModel(), folder / "checkpoints" / "last.ckpt"
    trainer = Trainer(
        devices=processes,
        accelerator="cpu",
        strategy="ddp_zero" if processes > 1 else "auto",
        accumulate_grad_batches=ACCUMULATED,
        max_epochs=EPOCHS,
        callbacks=ModelCheckpoint(save_last=True, save_top_k=0, every_n_train_steps=5),
        default_root_dir=folder,
        logger=CSVLogger(folder),
    )
    loader = DataLoader(Lines(), GLOBAL_BATCH // processes, shuffle=True)  # the same steps on any number of processes
    if last.exists():
        print(f"Resuming from step {torch.load(last)['global_step']} on {processes} processes.", flush=True)
    trainer.fit(model, loader, ckpt_path=last if last.exists() else None)
    loss = trainer.callback_metrics["loss"]
    print(f"After {trainer.epochs} epochs and {trainer.global_step} steps, the loss is {loss:.4f}.")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

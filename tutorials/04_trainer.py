"""Tutorial 4: the trainer. You write a step; it starts processes, distributes the data, and joins ranks.

63 batches do not divide evenly into two ranks, and the last batch is only half full. Other samplers repeat or drop
samples to make ranks even. Here each sample is used once in each epoch. So two processes end with the weights, metrics
and predictions of a single process. More processes make training faster, but do not change the result.
"""

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

from joinables.trainer import Trainer, TrainModule


class Digits(TrainModule):
    """Names the digit in an image of 8 x 8. The module defines steps; the trainer handles loops, devices and ranks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = cross_entropy(self.net(images), labels)
        self.log("loss", loss)  # becomes the mean over all samples of all ranks
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).double().mean())

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0]).argmax(1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 1000 images to train on, and 797 to validate on."""
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    data = images.float() / 16, labels
    return TensorDataset(*(part[:1000] for part in data)), TensorDataset(*(part[1000:] for part in data))


if __name__ == "__main__":
    training, validation = digits()

    module = Digits()
    trainer = Trainer(devices=2, accelerator="cpu", max_epochs=3, logger=False, seed=0)
    trainer.fit(module, DataLoader(training, 16, shuffle=True), DataLoader(validation, 16))
    print(
        "Two processes. The last epoch: `steps` counts a rank's own steps, `shadowed` the other's that it shadowed:\n"
    )
    print(trainer.join_report)
    assert [row.steps for row in trainer.join_report.ranks] == [32, 31]

    # A single process. A batch of 32 has the samples of two batches of 16, one from each rank.
    alone = Digits()
    single = Trainer(devices=1, accelerator="cpu", max_epochs=3, logger=False, seed=0)
    single.fit(alone, DataLoader(training, 32, shuffle=True))
    weights = [parameters_to_vector(each.parameters()) for each in (module, alone)]
    difference = (weights[0] - weights[1]).abs().max().item()
    print(f"\nThe weights are back in this process. They differ from those of one process by {difference:.0e}.")
    assert difference < 1e-5, "two processes must end where one ends"

    # The same trainer continues with the trained module. Each call starts its processes, and ends them.
    accuracy = trainer.validate(module, DataLoader(validation, 16))[0]["accuracy"]
    predicted = torch.cat(trainer.predict(module, DataLoader(validation, 16)))  # in the order of the data
    right = (predicted == validation.tensors[1]).double().mean().item()
    print(f"\nvalidate says that {accuracy:.3%} are right; of what predict returned, {right:.3%} are.")
    assert accuracy == right > 0.9

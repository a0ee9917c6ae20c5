"""Tutorial 4: the trainer, from zero. You say what a step is; it starts processes, deals out the data, and joins ranks.

63 batches do not go into two ranks, and the last batch is only half full. Other samplers repeat or drop samples to make
ranks even; here each sample is used once in each epoch. So the trained weights are those of one process, and so are all
metrics and predictions: the number of processes is about speed and nothing else.
"""

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

from joinables.trainer import Trainer, TrainModule


class Digits(TrainModule):
    """Names the digit in an image of 8 x 8. Only what is in a step is said; loops, devices and ranks are not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = cross_entropy(self.net(images), labels)
        self.log("loss", loss)  # in the end, the mean over all samples of all ranks
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).double().mean())

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0]).argmax(1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1000 images to train on, 797 to validate on."""
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    data = images.float() / 16, labels
    return TensorDataset(*(part[:1000] for part in data)), TensorDataset(*(part[1000:] for part in data))


if __name__ == "__main__":
    training, validation = digits()

    module = Digits()
    trainer = Trainer(devices=2, accelerator="cpu", max_epochs=3)
    result = trainer.fit(module, DataLoader(training, 16, shuffle=True), DataLoader(validation, 16))
    print(
        "Two processes. The last epoch: `steps` are a rank's own, `shadowed` those of the other after it had run out:\n"
    )
    print(result.join_report)
    assert [row.steps for row in result.join_report.ranks] == [32, 31]

    # One process, with batches of 32: what the two see together in a step.
    alone = Digits()
    Trainer(devices=1, accelerator="cpu", max_epochs=3).fit(alone, DataLoader(training, 32, shuffle=True))
    weights = [parameters_to_vector(each.parameters()) for each in (module, alone)]
    difference = (weights[0] - weights[1]).abs().max().item()
    print(f"\nThe weights are back in this process. They differ from those of one process by {difference:.0e}.")
    assert difference < 1e-5, "two processes must end where one ends"

    # The same trainer goes on with the trained module; each call starts its processes, and leaves none behind.
    accuracy = trainer.validate(module, DataLoader(validation, 16))[0]["accuracy"]
    predicted = torch.cat(trainer.predict(module, DataLoader(validation, 16)))  # in the order of the data
    right = (predicted == validation.tensors[1]).double().mean().item()
    print(f"\nvalidate says that {accuracy:.3%} are right; of what predict returned, {right:.3%} are.")
    assert accuracy == right > 0.9

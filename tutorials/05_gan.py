"""Tutorial 5: a GAN on two ranks, with two optimizers that the step itself drives.

With `automatic_optimization = False`, your step calls `manual_backward`, and steps the optimizers from `optimizers()`
as often as you like, in any order. A rank without data *shadows* all backwards: it takes part, and contributes nothing.
"""

import os

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

from joinables.trainer import Trainer, TrainModule

CENTRES = torch.tensor([-2.0, 2.0])


def network(size: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))


class Gan(TrainModule):
    """GAN that learns to draw numbers near -2 or near 2."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.critic = network(4), network(1)

    def training_step(self, batch, batch_idx):
        (real,) = batch
        of_generator, of_critic = self.optimizers()
        fake = self.generator(torch.randn(len(real), 4))

        of_critic.zero_grad()  # the critic learns to tell real numbers from drawn ones
        critic_loss = softplus(-self.critic(real)).mean() + softplus(self.critic(fake.detach())).mean()
        self.manual_backward(critic_loss)
        of_critic.step()

        of_generator.zero_grad()  # the generator learns to deceive the critic, whose gradients the next step clears
        generator_loss = softplus(-self.critic(fake)).mean()
        self.manual_backward(generator_loss)
        of_generator.step()
        self.log("critic_loss", critic_loss)

    def configure_optimizers(self):
        return [torch.optim.Adam(each.parameters(), 2e-3, (0.5, 0.99)) for each in (self.generator, self.critic)]


def histogram(values: torch.Tensor) -> str:
    counts = torch.histc(values, bins=61, min=-4, max=4)
    return "".join(" .:-=+*#%@"[int(count)] for count in (9.99 * counts / counts.max()).tolist())


def draw(gan: Gan) -> torch.Tensor:
    return gan.generator(torch.randn(4000, 4, generator=torch.Generator().manual_seed(1))).detach()


if __name__ == "__main__":
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # hides DDP's warning about backwards that use all parameters
    generator = torch.Generator().manual_seed(0)
    real = CENTRES[torch.randint(2, (1300, 1), generator=generator)] + 0.3 * torch.randn(1300, 1, generator=generator)
    gan = Gan()
    before = draw(gan)
    # 1300 numbers are 21 batches: 11 for rank 0, 10 for rank 1. Each rank derives its own random numbers from `seed`.
    trainer = Trainer(devices=2, accelerator="cpu", max_epochs=60, logger=False, seed=0)
    trainer.fit(gan, DataLoader(TensorDataset(real), 64, shuffle=True))
    after = draw(gan)

    print(f"{trainer.global_step} optimizer steps of two optimizers; in the last epoch:\n\n{trainer.join_report}\n")
    for name, values in (("real", real), ("before", before), ("after", after)):
        print(f"{name:>8} |{histogram(values)}|")
    print(f"{'':>8}  -4{'0':>28}{'4':>31}")
    near = [((after - centre).abs() < 1).double().mean().item() for centre in CENTRES]
    print(f"\nOf what the generator draws, {near[0]:.0%} is near -2 and {near[1]:.0%} near 2.")
    assert min(near) > 0.25 and sum(near) > 0.85, "the GAN must find both"

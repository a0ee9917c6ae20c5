"""Models whose loss takes other ways to the parameters than the outputs of the module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.utils import checkpoint as checkpoints

from tests.training import FEATURES


class Hiding:
    """An object of a class that nobody knows."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@dataclass
class Fields:
    probabilities: torch.Tensor
    hidden: Any = None


def checkpointed(part: Any, x: torch.Tensor) -> Any:
    return cast("Any", checkpoints).checkpoint(part, x, use_reentrant=True)


class Model(nn.Module):
    """Model whose forward shows its last layer in a way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.z: torch.Tensor = torch.zeros(())
        self.first, self.last = nn.Linear(FEATURES, 6), nn.Linear(6, 1)
        self.outside = nn.Parameter(torch.tensor(0.5)) if "outside" in way else None
        if way == "adapter":
            self.last.requires_grad_(False)
        if way == "hook":
            self.last.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.z = output

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x))

    def forward(self, x: torch.Tensor) -> Any:
        hidden: torch.Tensor
        if "reentrant" in self.way or self.way == "adapter":
            hidden = checkpointed(self.body, x.detach().requires_grad_())
        else:
            hidden = self.body(x)
        if self.way == "two reentrant, hidden":
            self.z = checkpointed(self.last, hidden)
        elif self.way == "hook":
            self.last(hidden)
        else:
            self.z = self.last(hidden)
        return self.shown(self.z)

    def shown(self, z: torch.Tensor) -> Any:
        match self.way:
            case "attribute" | "hook":
                return z.detach().sigmoid()
            case "attribute beside outputs" | "attribute beside outputs, outside":
                return {"probabilities": z.sigmoid()}
            case "object" | "two reentrant, hidden" | "reentrant, hidden":
                return Hiding(z)
            case "tuple with an object":
                return z.sigmoid(), Hiding(z)
            case "dataclass":
                return Fields(z.sigmoid(), Hiding(z))
            case "distribution":
                return torch.distributions.Normal(z, 1.0)
            case "nothing":
                return None
            case _:
                return z

    def loss(self, y: torch.Tensor) -> torch.Tensor:
        loss = (self.z - y).square().mean()
        return loss if self.outside is None else (-self.outside).exp() * loss + self.outside

    def penalty(self) -> torch.Tensor:
        return sum((0.1 * each.square().sum() for each in self.parameters() if each.requires_grad), torch.zeros(()))

"""Small models, optimizers and data that distributed tests and their single-process references share."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

FEATURES, TARGETS, BATCH = 4, 2, 5
TOLERANCE = 2e-6


def batch(rank: int, epoch: int, step: int, stream: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch that ``rank`` sees at a step; the same wherever it is asked for."""
    generator = torch.Generator().manual_seed(1 + rank + 10 * epoch + 1000 * step + 100000 * stream)
    return torch.randn(BATCH, FEATURES, generator=generator), torch.randn(BATCH, TARGETS, generator=generator)


def learn_graph(ddp: Any, loss: Callable[[], torch.Tensor]) -> None:
    """Run the step before the block that a ``static_graph`` module needs; it changes nothing else."""
    if getattr(ddp, "static_graph", False):
        state = copy.deepcopy(ddp.state_dict())
        with torch.random.fork_rng(devices=[]):
            loss().backward()
        ddp.load_state_dict(state)
        ddp.zero_grad()


class MLP(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, TARGETS))


class Norm(nn.Sequential):
    # No bias before BatchNorm: its gradient is zero but for rounding, which Adam would blow up to full steps.
    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__(nn.Linear(FEATURES, 8, bias=False), nn.BatchNorm1d(8, eps), nn.Tanh(), nn.Linear(8, TARGETS))


class Frozen(nn.Sequential):
    """Its first and third layers do not train."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, TARGETS))
        for index in (0, 2):
            self[index].requires_grad_(False)


class Branches(nn.Module):
    """Uses another branch on every rank, and one parameter nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, 8)
        self.heads = nn.ModuleList(nn.Linear(8, TARGETS) for _ in range(3))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.heads[branch](torch.tanh(self.stem(x)))


@dataclass
class Output:
    value: torch.Tensor
    label: str


class Opaque:
    """An object that nobody can look into for tensors."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Wrapped(nn.Module):
    """Returns its result inside a container."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.body, self.container = MLP(), container

    def forward(self, x: torch.Tensor) -> Any:
        y = self.body(x)
        if self.container == "tuple":
            return y, (2 * y, "text")
        if self.container == "dict":
            return {"value": y, "nested": [{"twice": 2 * y}]}
        return Output(y, "text") if self.container == "dataclass" else Opaque(y)


def value_of(output: Any) -> torch.Tensor:
    """The main tensor in a model's output."""
    if isinstance(output, tuple):
        return output[0] + output[1][0]
    if isinstance(output, dict):
        return output["value"] + output["nested"][0]["twice"]
    return output.value if isinstance(output, (Output, Opaque)) else output


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name in ("tuple", "dict", "dataclass", "opaque"):
        return Wrapped(name)
    if name == "norm with a large eps":
        return Norm(0.1)
    return {"mlp": MLP, "norm": Norm, "branches": Branches, "frozen": Frozen}[name]()


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain sgd": (torch.optim.SGD, {"lr": 0.05}),
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}


def flat_state(*parts: Any) -> dict[str, torch.Tensor]:
    """All tensors and numbers of nested state, by path, as float64 on the CPU."""
    found: dict[str, torch.Tensor] = {}

    def visit(path: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[path] = value.detach().to("cpu", torch.float64, copy=True)
        elif isinstance(value, bool) or value is None or isinstance(value, str):
            found[path] = torch.tensor(float(zlib.crc32(str(value).encode())), dtype=torch.float64)
        elif isinstance(value, (int, float)):
            found[path] = torch.tensor(float(value), dtype=torch.float64)
        elif isinstance(value, dict):
            for key, each in value.items():
                visit(f"{path}.{key}", each)
        elif isinstance(value, (list, tuple)):
            for index, each in enumerate(value):
                visit(f"{path}.{index}", each)

    for index, part in enumerate(parts):
        visit(str(index), part)
    return found


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    """Compare two flat states; ``tolerance`` is absolute."""
    assert left.keys() == right.keys(), sorted(left.keys() ^ right.keys())
    for path, value in left.items():
        difference = (value - right[path]).abs().max().item() if value.numel() else 0.0
        assert difference <= tolerance, f"{path} differs by {difference:.2e}"


def mlp_in_one_process(counts: Sequence[int], epochs: int = 1, lr: float = 1e-3) -> list[torch.Tensor]:
    """Train the MLP by Adam in a single process, on the batches of ranks with these ``counts``; its parameters.

    The data of each epoch are the same: those of epoch 0.
    """
    model = build("mlp")
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for step in [*range(max(counts))] * epochs:
        x, y = zip(*(batch(rank, 0, step) for rank, count in enumerate(counts) if step < count), strict=True)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(torch.cat(x)), torch.cat(y)).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]

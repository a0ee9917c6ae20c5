"""Random models: a :class:`Recipe` is plain data, drawn by :func:`recipes`, of which ``build`` makes a module.

Every layer maps ``[batch, LENGTH, WIDTH]`` to the same shape, so that any sequence of layers is a model. All is done in
double precision: what is left of rounding is then far below the tolerance, also where an optimizer blows it up. Nothing
may grow from layer to layer: residuals are means, and norms have a large ``eps``. No part returns a view, of which
``fully_shard`` warns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.training import FEATURES, TARGETS

LENGTH, WIDTH, VOCABULARY, EPS = FEATURES, 4, 6, 0.5

LEAVES = ("linear", "conv1d", "conv2d", "batch norm", "layer norm", "group norm", "attention", "encoder", "gru")


@dataclass(frozen=True)
class Recipe:
    """A model.

    A layer is a tuple of its kind and what it is made of: one of ``LEAVES``; ``("again", i)``, a leaf that was made
    before, once more; ``("frozen", layer)``; ``("unused", layer)``, which is never called; ``("residual", *layers)``;
    ``("checkpoint", *layers)``, computed again in the backward; ``("branch", bit, layers, layers)``, either of which is
    taken, as the bit of the number given to the forward says.
    """

    layers: tuple[Any, ...]
    entry: str = "linear"  # or "embedding"
    head: str = "linear"  # or "tied", to the embedding

    def build(self) -> nn.Module:
        return Built(self)

    def has(self, *kinds: str) -> bool:
        """Whether there is a layer of one of these kinds."""

        def search(layers: Any) -> bool:
            return isinstance(layers, tuple) and any(each in kinds or search(each) for each in layers)

        return search(self.layers)


class Built(nn.Module):
    """The model of a recipe."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if recipe.entry == "embedding" else None
        self.entry = nn.Linear(1, WIDTH) if recipe.entry == "linear" else None
        leaves: list[nn.Module] = []
        self.body = Chain([_layer(spec, leaves) for spec in recipe.layers])
        is_tied = recipe.head == "tied" and self.embedding is not None
        self.head = nn.Linear(WIDTH, VOCABULARY if is_tied else TARGETS)
        if is_tied:
            assert self.embedding is not None
            self.head.weight = self.embedding.weight
        self.double()

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        if self.embedding is not None:
            hidden = self.embedding((2 * x).round().long() % VOCABULARY)
        else:
            assert self.entry is not None
            hidden = self.entry(x.double().unsqueeze(-1)).clone()
        return self.head(self.body(hidden, branch).mean(1))[:, :TARGETS].clone()


class Chain(nn.Module):
    """Layers, one after the other."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, branch)
        return x if self.layers else x.clone()


class Leaf(nn.Module):
    """A module of torch, from and to ``[batch, LENGTH, WIDTH]``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.module: Any = {
            "linear": lambda: nn.Linear(WIDTH, WIDTH),
            "conv1d": lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
            "conv2d": lambda: nn.Conv2d(1, 2, 3, padding=1),
            "batch norm": lambda: nn.BatchNorm1d(WIDTH, eps=EPS),
            "layer norm": lambda: nn.LayerNorm(WIDTH, eps=EPS),
            "group norm": lambda: nn.GroupNorm(2, WIDTH, eps=EPS),
            "attention": lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
            "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, layer_norm_eps=EPS, batch_first=True),
            "gru": lambda: nn.GRU(WIDTH, WIDTH, batch_first=True),
        }[kind]()

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        if self.kind in ("batch norm", "group norm", "conv1d"):
            x = self.module(x.transpose(1, 2)).transpose(1, 2)
        elif self.kind == "conv2d":
            x = self.module(x.unsqueeze(1)).sum(1)
        elif self.kind == "attention":
            x = self.module(x, x, x, need_weights=False)[0]
        elif self.kind == "gru":
            x = self.module(x)[0]
        else:
            x = self.module(x)
        return torch.tanh(x) if self.kind in ("linear", "conv1d", "conv2d") else x.clone()


class _Unused(Chain):
    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return x.clone()


class _Residual(Chain):
    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return (x + super().forward(x, branch)) / 2


class _Checkpoint(Chain):
    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        result: Any = checkpoint(super().forward, x, branch, use_reentrant=False)
        return result


class _Branch(nn.Module):
    def __init__(self, bit: int, paths: Sequence[nn.Module]) -> None:
        super().__init__()
        self.bit, self.paths = bit, nn.ModuleList(paths)

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.paths[branch >> self.bit & 1](x, branch)


def _layer(spec: tuple[Any, ...], leaves: list[nn.Module]) -> nn.Module:
    kind, *parts = spec
    if kind == "again":
        return leaves[parts[0] % len(leaves)] if leaves else Chain([])
    if kind in LEAVES:
        leaves.append(Leaf(kind))
        return leaves[-1]
    if kind == "branch":
        bit, *paths = parts
        return _Branch(bit, [Chain([_layer(each, leaves) for each in path]) for path in paths])
    layers = [_layer(each, leaves) for each in parts]
    if kind == "frozen":
        return Chain(layers).requires_grad_(False)
    return {"unused": _Unused, "residual": _Residual, "checkpoint": _Checkpoint}[kind](layers)


def _wrapped(layer: st.SearchStrategy[Any], branches: bool) -> st.SearchStrategy[Any]:
    path = st.lists(layer, max_size=2).map(tuple)
    layers = st.lists(layer, min_size=1, max_size=2)
    kinds: list[st.SearchStrategy[Any]] = [
        layers.map(lambda each: ("residual", *each)),
        layers.map(lambda each: ("checkpoint", *each)),
    ]
    return st.one_of([st.tuples(st.just("branch"), st.integers(0, 1), path, path), *kinds] if branches else kinds)


def recipes(*, branches: bool = True) -> st.SearchStrategy[Recipe]:
    """Models of a few layers, with or without branches."""
    leaf = st.sampled_from(LEAVES).map(lambda kind: (kind,))
    again = st.tuples(st.just("again"), st.integers(0, 3))
    kept = st.sampled_from(["frozen", "unused"])
    layer = st.recursive(leaf | again | st.tuples(kept, leaf), lambda each: _wrapped(each, branches), max_leaves=4)
    layers = st.lists(layer, min_size=1, max_size=4).map(tuple)
    entry, head = st.sampled_from(["linear", "embedding"]), st.sampled_from(["linear", "tied"])
    return st.builds(Recipe, layers, entry, head)

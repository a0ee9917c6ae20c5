"""What a test trains, and how: a :class:`Case` is plain data, made of parts that functions take on their own.

It prints as it is made, so that a random case that failed can be put into a test.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tests.grammar import Recipe
from tests.selection import Epochs, first_and_last


@dataclass(frozen=True)
class Model:
    """What is trained, and where."""

    kind: str | Recipe = "mlp"  # a name of tests/models.py, or a recipe
    synchronised: bool = False  # its batch norms are
    compiled: bool = False
    device: str = "cpu"  # or "cuda" or "sim": one for all ranks with gloo, else one for each


@dataclass(frozen=True)
class DDP:
    """How a model is put into ``DistributedDataParallel``."""

    options: dict[str, Any] = field(default_factory=dict[str, Any])
    hook: str = ""  # or "allreduce"


@dataclass(frozen=True)
class Shards:
    """How a model is sharded by ``fully_shard``."""

    replicas: int = 1
    reshard: bool | None = None
    units: tuple[str, ...] = ("Linear",)  # classes of parts that are sharded before the whole, inner ones first
    syncs: str = "reduces when it steps"
    divides: bool = True  # gradients by the number of ranks, or not at all


@dataclass(frozen=True)
class Optimizer:
    """An optimizer, and how its learning rate decays."""

    kind: str = "adam"
    rate: float | None = None
    decay: float = 0.9  # of the learning rate, at each step
    zero: bool = False
    zero_views: bool = False


@dataclass(frozen=True)
class Data:
    """What ranks have; counts[epoch][rank] is the number of batches."""

    counts: Epochs = ((0, 3, 1), (2, 0, 4), (3, 1, 0))
    weighted: bool = False  # batches are of several sizes, and count by them

    @property
    def ranks(self) -> int:
        return len(self.counts[0])


@dataclass(frozen=True)
class Loop:
    """The blocks, and how they go over the data."""

    iterate: str = ""  # over join.iterate, with these dummies: "empty", "last" or "a function"
    lookahead: int = 1
    until: str = "all"
    stop: int | None = None  # all ranks break out of join.iterate after as many steps
    one_block: bool = False  # for all epochs
    one_join: bool = False  # a block for each epoch, of the same Join
    plain_last: bool = False  # the last epoch is not over join.iterate


@dataclass(frozen=True)
class Step:
    """What a step does, and by what its gradients are divided."""

    initial: bool = False  # by all ranks, also those without data
    accumulate: int = 1
    divided: bool = False  # the loss by that number, also with weights: Join is told
    to_none: bool = True
    zero_every: int = 1  # optimizer steps; in between, gradients pile up
    clip: bool = False
    forwards: int = 1  # before each backward
    evaluates: bool = False  # at some steps


@dataclass(frozen=True)
class Case:
    """One way to train."""

    model: Model = field(default_factory=Model)
    wrapper: DDP | Shards = field(default_factory=DDP)
    optimizer: Optimizer = field(default_factory=Optimizer)
    data: Data = field(default_factory=Data)
    loop: Loop = field(default_factory=Loop)
    step: Step = field(default_factory=Step)

    def scales(self, epoch: int) -> bool:
        """Whether losses go through ``join.scale``: gradients are the mean over micro-batches, too."""
        in_window = self.in_lockstep(epoch) and (self.step.accumulate > 1 or self.model.synchronised or self.is_sharded)
        return self.data.weighted or self.step.divided or in_window

    @property
    def is_sharded(self) -> bool:
        """Whether the forward communicates, so that all ranks must run it."""
        return isinstance(self.wrapper, Shards)

    def in_lockstep(self, epoch: int) -> bool:
        return bool(self.loop.iterate) and not (self.loop.plain_last and epoch == len(self.data.counts) - 1)

    def trained(self, epoch: int) -> tuple[int, ...]:
        """How many of its batches each rank comes to."""
        counts = self.data.counts[epoch]
        if not self.in_lockstep(epoch):
            return counts
        most = min(counts) if self.loop.until == "first" else max(counts)
        return tuple(min(count, most, most if self.loop.stop is None else self.loop.stop) for count in counts)


def shorter(case: Case) -> Case:
    """A case of three epochs is one of two in ``make test``."""
    return replace(case, data=replace(case.data, counts=first_and_last(case.data.counts)))

"""A joinable of one's own, as a user would write it, for tests with thread ranks."""

from __future__ import annotations

from typing import Any

import torch

from join import Burst, Join, Joinable, JoinHook


class Counter(Joinable):
    """Counts its calls on all ranks: each call is one all-reduce of how many ranks called."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.total = 0
        self.works: list[Any] = []
        self.keywords: dict[str, Any] = {}
        self.last_joiner: bool | None = None

    def __call__(self) -> None:
        self.works.append(Join.notify_join_context(self))
        self.total += self.reduce(1)

    def reduce(self, mine: int) -> int:
        ones = torch.tensor([mine])
        self.group.all_reduce(ones).wait()
        return int(ones.item())

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.keywords = kwargs
        return CounterHook(self)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return self.group


class CounterHook(JoinHook):
    def __init__(self, counter: Counter) -> None:
        self.counter = counter

    def main_hook(self) -> None:
        self.counter.total += self.counter.reduce(0)

    def post_hook(self, is_last_joiner: bool) -> None:
        self.counter.last_joiner = is_last_joiner


class Leading(Burst):
    """A counter that keeps its own time."""

    def __init__(self, group: Any, name: str = "leading") -> None:
        super().__init__()
        self.inner = Counter(group)
        self._name = name

    def __call__(self) -> None:
        Join.notify_join_context(self)
        self.inner.total += self.inner.reduce(1)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return CounterHook(self.inner)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return self.inner.group

    @property
    def join_name(self) -> str:
        return self._name


def group_works(collective: Any) -> None:
    """See whether nothing is pending on the group."""
    ones = torch.ones(1)
    collective.all_reduce(ones).wait()
    assert ones.item() == collective.world_size


def blames(text: str, rank: int, error: str) -> bool:
    """Whether a rank is told that another one has failed, and that the group does not work."""
    return text.startswith(f"PeerError: rank {rank} failed: {error}") and text.endswith("restart from a checkpoint")


class Counting:
    """Counts what a store is asked for."""

    def __init__(self, store: Any) -> None:
        self._store, self.requests = store, 0

    def clone(self) -> Counting:
        return self

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        return getattr(self._store, name)

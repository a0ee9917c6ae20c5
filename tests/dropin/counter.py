"""A joinable of one's own, of whichever library."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms import join


def counter_class(library: Any) -> Any:
    """The class of a joinable that derives from the library's."""

    class Hook(library.JoinHook):
        def __init__(self, counter: Any, most: bool) -> None:
            self.counter, self.most = counter, most

        def main_hook(self) -> None:
            self.counter.total += self.counter.reduce(0)

        def post_hook(self, is_last_joiner: bool) -> None:
            self.counter.last_joiner = is_last_joiner
            if self.most:  # those of the ranks that came last
                calls = len(self.counter.works) if is_last_joiner else 0
                self.counter.calls_of_last = self.counter.reduce(calls, dist.ReduceOp.MAX)

    class Counter(library.Joinable):
        """How often all ranks have called it together, as each of them knows."""

        def __init__(self, group: Any = None) -> None:
            super().__init__()
            self.group = group or dist.group.WORLD
            self.total, self.works, self.keywords = 0, [], {}
            self.last_joiner: bool | None = None
            self.calls_of_last: int | None = None

        def __call__(self) -> None:
            self.works.append(library.Join.notify_join_context(self))
            self.total += self.reduce(1)

        def reduce(self, mine: int, op: Any = dist.ReduceOp.SUM) -> int:
            number = torch.tensor([mine])
            dist.all_reduce(number, op, self.group)
            return int(number)

        def join_hook(self, **kwargs: Any) -> Any:
            self.keywords = kwargs
            return Hook(self, kwargs.get("most", False))

        @property
        def join_device(self) -> torch.device:
            return torch.device("cpu")

        @property
        def join_process_group(self) -> Any:
            return self.group

        @property
        def silent(self) -> list[bool]:
            return [work is None for work in self.works]

    return Counter


Summer = counter_class(join)
"""A joinable that somebody has written for torch's ``Join``."""

"""Somebody's joinable, written for torch's ``Join``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.algorithms.join import Joinable as TorchJoinable
from torch.distributed.algorithms.join import JoinHook as TorchJoinHook


class Summer(TorchJoinable):
    """Somebody's torch Joinable, as their documentation has it."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.group = group or dist.group.WORLD
        self.total, self.keywords, self.last, self.works = 0, {}, None, []

    def __call__(self) -> None:
        self.works.append(TorchJoin.notify_join_context(self))
        self.total += self.reduce(1)

    def reduce(self, mine: int) -> int:
        ones = torch.tensor([mine])
        dist.all_reduce(ones, group=self.group)
        return int(ones.item())

    def join_hook(self, **kwargs: Any) -> TorchJoinHook:
        self.keywords = kwargs
        return SummerHook(self)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return self.group


class SummerHook(TorchJoinHook):
    def __init__(self, summer: Summer) -> None:
        self.summer = summer

    def main_hook(self) -> None:
        self.summer.total += self.summer.reduce(0)

    def post_hook(self, is_last_joiner: bool) -> None:
        self.summer.last = is_last_joiner  # pyright: ignore[reportAttributeAccessIssue]

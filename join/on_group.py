"""Joinables that are their own hooks and stand for no object, only for ranks: :class:`OnGroup`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from typing_extensions import override

from join.joinable import Burst, Joinable, JoinHook


class OnGroup(Joinable, JoinHook):
    """Communicates, if at all, on a group that it is given; takes no keywords.

    Args:
        process_group: the ranks; ``None`` is the default group.
    """

    join_keywords: ClassVar[frozenset[str] | None] = frozenset()

    def __init__(self, process_group: Any) -> None:
        super().__init__()
        self._group = process_group

    @override
    def join_hook(self, **kwargs: Any) -> JoinHook:
        return self

    @property
    @override
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    @override
    def join_process_group(self) -> Any:
        return self._group


class NothingListed(OnGroup, Burst):
    """Has no collectives: what its ranks keep in step is their loops over ``Join.iterate``."""

"""What all adapters have in common: :class:`StandIn`."""

from __future__ import annotations

from typing import Any, cast

import torch
from typing_extensions import override

from join import Joinable


class StandIn(Joinable):
    """Stands for an object: device, process group and name are the object's.

    Args:
        target: the object; it is left alone until ``attach``.
    """

    def __init__(self, target: Any) -> None:
        super().__init__()
        self._target = target

    @property
    @override
    def join_device(self) -> torch.device:
        return cast("torch.device", self._target.join_device)

    @property
    @override
    def join_process_group(self) -> Any:
        return self._target.join_process_group

    @property
    @override
    def join_name(self) -> str:
        return type(self._target).__name__

    @property
    @override
    def join_target(self) -> Any:
        return self._target

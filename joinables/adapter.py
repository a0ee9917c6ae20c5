"""Base classes of adapters: :class:`Adapter`, :class:`Announcing` and :class:`Silent`.

An :class:`Announcing` adapter is for objects with bursts, a :class:`Silent` one for state only. :class:`TorchJoinable`
is for classes that derive from torch's own ``Joinable``. They call
``torch.distributed.algorithms.Join.notify_join_context``, and need no change for this package. While a block is open,
the call is routed to its ``Join``. Torch's ``JoinHook`` has the same two methods.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from torch.distributed.algorithms.join import Joinable as TorchJoinableBase
from typing_extensions import override

from join import Burst, Join, Joinable, JoinHook
from join.arguments import check_initialised
from joinables._torch.objects import routed_notifications


class Adapter(Joinable, JoinHook):
    """Joinable for an object, which is also its own hook. Device, process group and name come from the object.

    The object needs the properties ``join_device`` and ``join_process_group``, as DDP modules and torch's own
    ``Joinable`` objects have them. Override both properties for other objects.

    Args:
        target: The object. It stays unchanged until ``attach``.
        name: The name in reports and errors; by default the name of the object's class.
    """

    join_keywords: ClassVar[frozenset[str] | None] = frozenset()

    def __init__(self, target: Any, name: str | None = None) -> None:
        super().__init__()
        self._target, self._name = target, type(target).__name__ if name is None else name
        self._handles: list[Any] = []
        """Handles of the hooks that ``attach`` registered on the object. ``detach`` removes them."""

    @override
    def join_hook(self, **kwargs: Any) -> JoinHook:
        return self

    @property
    @override
    def join_device(self) -> torch.device:
        return self._target.join_device

    @property
    @override
    def join_process_group(self) -> Any:
        return self._target.join_process_group

    @property
    @override
    def join_name(self) -> str:
        return self._name + self.join_place

    @property
    @override
    def join_target(self) -> Any:
        return self._target

    @override
    def attach(self, join: Join) -> None:
        self._channel, self._collective = join.channel, join.collective

    @override
    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        del self._channel, self._collective  # they would keep the object alive


class Announcing(Adapter, Burst):
    """Adapter for an object that communicates in the loop.

    A subclass registers hooks on the object in ``attach``. The hooks call ``self._channel.announce(self)`` before the
    object's collectives. On a rank that is out of data, ``main_hook`` issues the same collectives without those hooks.
    """


class Silent(Adapter):
    """Adapter for an object that issues no collective in the loop. Its work is done when the block ends."""

    communicates: ClassVar[bool] = False
    join_device = property(lambda _: torch.device("cpu"))  # pyright: ignore[reportIncompatibleMethodOverride]
    join_process_group = property(lambda _: None)  # pyright: ignore[reportIncompatibleMethodOverride]


class TorchJoinable(Adapter):
    """Adapter for an object whose class derives from torch's ``Joinable``."""

    join_keywords: ClassVar[frozenset[str] | None] = None

    def __init__(self, target: TorchJoinableBase) -> None:
        super().__init__(target)
        check_initialised(target)
        self._routes = ExitStack()

    @override
    def join_hook(self, **kwargs: Any) -> JoinHook:
        return self._target.join_hook(**kwargs)

    @override
    def attach(self, join: Join) -> None:
        first = self.join_config.is_first_joinable
        self._routes.enter_context(
            routed_notifications(self._target, lambda: Join.notify_join_context(self), first=first)
        )

    @override
    def detach(self) -> None:
        self._routes.close()

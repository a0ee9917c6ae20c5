"""Adapter for classes that derive from torch's own ``Joinable``: :class:`TorchJoinable`.

They call ``torch.distributed.algorithms.Join.notify_join_context``, and need no change for this package: while a block
is open, the call goes to its ``Join``. Torch's ``JoinHook`` has the same two methods.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, ClassVar

from torch.distributed.algorithms.join import Joinable as TorchJoinableBase
from typing_extensions import override

from join import Join, JoinHook
from join.arguments import check_initialised
from join.joinable import Block
from joinables._torch.torch_join import routed_notifications
from joinables.adapter import Adapter


class TorchJoinable(Adapter):
    """Stands for one object whose class derives from torch's ``Joinable``."""

    join_keywords: ClassVar[frozenset[str] | None] = None

    def __init__(self, target: TorchJoinableBase) -> None:
        super().__init__(target)
        check_initialised(target)
        self._routes = ExitStack()

    @override
    def join_hook(self, **kwargs: Any) -> JoinHook:
        return self._target.join_hook(**kwargs)

    @override
    def attach(self, join: Block) -> None:
        first = self.join_config.is_first_joinable
        self._routes.enter_context(
            routed_notifications(self._target, lambda: Join.notify_join_context(self), first=first)
        )

    @override
    def detach(self) -> None:
        self._routes.close()

"""Every private API of torch's own ``Join`` that this package calls, each with what it stands in for."""

# What is private is not in torch's type stubs, or has no types there.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.algorithms.join import _JoinConfig as TorchJoinConfig

is_in_torch_join: Callable[[Any], bool] = attrgetter("_join_config.enable")
"""Whether torch's own ``Join`` is around a module or optimizer. Stands in for its ``_join_config``."""


@contextmanager
def routed_notifications(joinable: Any, notify: Callable[[], Any], *, first: bool) -> Generator[None]:
    """Send a torch ``Joinable``'s ``Join.notify_join_context(self)`` to ``notify`` while the context is open.

    Stands in for a hook in torch's ``Join``: its static method is replaced, calls for other objects pass through, and
    both the method and the object's ``_join_config`` are put back.
    """
    original, config = TorchJoin.notify_join_context, joinable._join_config

    def notify_join_context(obj: Any) -> Any:
        return notify() if obj is joinable else original(obj)

    TorchJoin.notify_join_context = staticmethod(notify_join_context)
    joinable._join_config = TorchJoinConfig(enable=True, throw_on_early_termination=False, is_first_joinable=first)
    try:
        yield
    finally:
        TorchJoin.notify_join_context = staticmethod(original)
        joinable._join_config = config

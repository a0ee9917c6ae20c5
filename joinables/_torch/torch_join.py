"""Every private API of torch's own ``Join`` that this package calls, each with what it stands in for."""

# What is private is not in torch's type stubs, or has no types there.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.algorithms.join import _JoinConfig as TorchJoinConfig

is_in_torch_join: Callable[[Any], bool] = attrgetter("_join_config.enable")
"""Whether torch's own ``Join`` is around a module or optimizer. Stands in for its ``_join_config``."""

_routes: dict[int, Callable[[], Any]] = {}  # by the id of the joinable
_original: Callable[[Any], Any] = TorchJoin.notify_join_context  # while there are routes: what is replaced
_lock = threading.Lock()


@contextmanager
def routed_notifications(joinable: Any, notify: Callable[[], Any], *, first: bool) -> Generator[None]:
    """Send a torch ``Joinable``'s ``Join.notify_join_context(self)`` to ``notify`` while the context is open.

    Stands in for a hook in torch's ``Join``: its static method is replaced while any such context is open, calls for
    other objects pass through, and both the method and the object's ``_join_config`` are put back.
    """
    config = joinable._join_config
    with _lock:
        if not _routes:
            _replace_method()  # which is put back with the last route, whichever that is
        _routes[id(joinable)] = notify
    joinable._join_config = TorchJoinConfig(enable=True, throw_on_early_termination=False, is_first_joinable=first)
    try:
        yield
    finally:
        joinable._join_config = config
        with _lock:
            del _routes[id(joinable)]
            if not _routes:
                TorchJoin.notify_join_context = staticmethod(_original)


def _replace_method() -> None:
    global _original
    _original = TorchJoin.notify_join_context
    TorchJoin.notify_join_context = staticmethod(_notify_join_context)


def _notify_join_context(obj: Any) -> Any:
    notify = _routes.get(id(obj))
    return _original(obj) if notify is None else notify()

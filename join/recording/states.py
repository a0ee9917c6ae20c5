"""When bursts begin and end: :func:`watch`, which sees each change of ``Burst.state``.

The state is a plain attribute, which costs nothing where nobody watches. While somebody does, ``Burst`` has a
descriptor in its place, which keeps the value where the attribute had it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeAlias

from join.joinable import Burst, BurstState

Watcher: TypeAlias = Callable[[BurstState, BurstState], None]
"""Called with a burst's state before and after a change."""

_watchers: dict[int, Watcher] = {}  # by the id of the burst
_lock = threading.Lock()


class _Watched:
    """Stands for ``Burst.state``."""

    def __get__(self, burst: Burst | None, owner: type[Burst]) -> BurstState:
        return BurstState.IDLE if burst is None else vars(burst).get("state", BurstState.IDLE)

    def __set__(self, burst: Burst, state: BurstState) -> None:
        before, vars(burst)["state"] = vars(burst).get("state", BurstState.IDLE), state
        watcher = _watchers.get(id(burst))
        if watcher is not None and before is not state:
            watcher(before, state)


def watch(burst: Burst, watcher: Watcher) -> None:
    """Have ``watcher`` called at each change of the burst's state; until :func:`leave_alone`."""
    with _lock:
        if not _watchers:
            _put(_Watched())
        _watchers[id(burst)] = watcher


def leave_alone(burst: Burst) -> None:
    """Watch the burst no longer."""
    with _lock:
        if _watchers.pop(id(burst), None) is not None and not _watchers:
            _put(BurstState.IDLE)


def _put(state: Any) -> None:
    type.__setattr__(Burst, "state", state)

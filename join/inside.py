"""Which block an object is in: :func:`block_of`.

By identity, and not on the objects: a joinable must stay picklable inside its block.
"""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Sequence
from typing import Any

from join.joinable import Joinable, JoinConfig

_blocks: dict[int, Any] = {}  # by joinable and by what it stands for


def block_of(obj: Any) -> Any:
    """The ``Join`` whose block is open, and has this joinable, or has one that stands for this object."""
    return _blocks.get(id(obj))


def put_inside(join: Any, joinables: Sequence[Joinable], *, enable: bool, throw: bool) -> None:
    """Record that these joinables are in the block of ``join``."""
    for position, joinable in enumerate(joinables):
        _blocks[id(joinable)] = _blocks[id(joinable.join_target)] = join
        _set_config(joinable, JoinConfig(enable, throw, position == 0))


def put_outside(joinables: Sequence[Joinable]) -> None:
    """Record that these joinables are in no block any more."""
    for joinable in joinables:
        _blocks.pop(id(joinable), None)
        _blocks.pop(id(joinable.join_target), None)
        _set_config(joinable, JoinConfig.construct_disabled_join_config())


def _set_config(joinable: Joinable, config: JoinConfig) -> None:
    object.__setattr__(joinable, "_join_config", config)


@atexit.register
def _warn_of_open_blocks() -> None:
    if _blocks:
        warnings.warn(
            "a Join block was opened and not left, so that the other ranks wait for this one: call join.close()",
            stacklevel=1,
        )

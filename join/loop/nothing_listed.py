"""What stands in a block for which nothing is listed, :class:`NothingListed`; and a warning where no loop was made."""

from __future__ import annotations

import warnings

from join.joinable import Burst
from join.on_group import OnGroup


class NothingListed(OnGroup, Burst):
    """Has a group, and no collectives: what its ranks keep in step is their loops over ``Join.iterate``."""


def warn_of_no_loop(what: str) -> None:
    """Warn the code that has left a block in which nothing can happen but in a loop."""
    warnings.warn(
        f"{what} is for loops over join.iterate, and there was none: write for batch in join.iterate(loader)",
        stacklevel=3,
    )

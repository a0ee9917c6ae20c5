"""What stands in a block for which nothing is listed: :class:`NothingListed`."""

from __future__ import annotations

from join.joinable import Burst
from join.on_group import OnGroup


class NothingListed(OnGroup, Burst):
    """Has a group, and no collectives: what its ranks keep in step is their loops over ``Join.iterate``."""

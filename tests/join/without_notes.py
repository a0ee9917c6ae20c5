"""A line between threads that keeps no notes, as between machines."""

from __future__ import annotations

from typing import Any

from join.collectives import ThreadCollective
from join.collectives.line import GroupLine


class WithoutNotes(GroupLine):
    """Takes the place of the line that threads have."""

    def __init__(self, world: Any, collective: ThreadCollective) -> None:
        super().__init__(collective)

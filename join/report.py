"""Report on a ``Join`` block: :class:`JoinReport`, with a :class:`RankReport` for each rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from join.errors import JoinError


@dataclass(frozen=True)
class RankReport:
    """Row of a report for one rank.

    Attributes:
        rank: The rank in the process group.
        steps: The number of batches that this rank had in loops over ``Join.iterate``. If the block had no such loop,
            the number of bursts, such as backwards, that this rank announced for the joinable with the most
            announcements.
        shadowed: The number of dummy batches of this rank in such loops. If the block had none, the number of bursts of
            other ranks that this rank shadowed, of the same joinable.
        joined_at: Seconds from entering the block until this rank was out of data.
        ended_at: Seconds from entering the block until all ranks were out of data.
        idle: Seconds that this rank waited for headers after it had joined.
        headers: The number of headers that this rank sent.
        header_bytes: The size of these headers in bytes.
    """

    rank: int
    steps: int
    shadowed: int
    joined_at: float
    ended_at: float
    idle: float
    headers: int
    header_bytes: int


@dataclass(frozen=True)
class JoinReport:
    """Rows of all ranks, equal on every rank. ``str()`` returns a table.

    Attributes:
        ranks: One row for each rank; empty for a block with ``enable=False``.
        even: Whether all ranks ran out of data together.
        counts_steps: Whether all steps of the block were steps of loops over ``Join.iterate``.
    """

    ranks: tuple[RankReport, ...] = ()
    even: bool = True
    counts_steps: bool = False

    @property
    def steps(self) -> int:
        """Number of steps of the loops over ``Join.iterate`` in the block, which all ranks made.

        Raises:
            JoinError: If the block had a plain loop, which may run any number of backwards in a step.
        """
        if not self.counts_steps:
            raise JoinError(
                "report.steps is unknown after this block, because only loops over join.iterate count their steps. Loop"
                " over join.iterate, or count the steps of your loop on each rank, and all-reduce the largest count"
                " after the block. [J442]"
            )
        return max(row.steps + row.shadowed for row in self.ranks)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data that ``json`` can write."""
        return asdict(self)

    def __str__(self) -> str:
        head = ("rank", "steps", "shadowed", "joined at", "idle", "headers", "bytes")
        body = [
            (str(r.rank), str(r.steps), str(r.shadowed), f"{r.joined_at:.2f} s", f"{r.idle:.2f} s", str(r.headers),
             str(r.header_bytes))
            for r in self.ranks
        ]  # fmt: skip
        widths = [max(len(row[column]) for row in (head, *body)) for column in range(len(head))]
        return "\n".join("  ".join(map(str.rjust, row, widths)) for row in (head, *body))

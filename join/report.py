"""What happened in a ``Join`` block, rank by rank: :class:`JoinReport`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any, cast

import torch

from join.collectives import Collective


@dataclass(frozen=True)
class RankReport:
    """One rank's row.

    Attributes:
        rank: the rank in the group.
        steps: bursts that this rank announced, of the joinable that announced most.
        shadowed: bursts of other ranks that it shadowed, likewise.
        joined_at: seconds from entering the block to running out of inputs.
        idle: seconds of waiting for headers as a joined rank.
        headers: how many headers it sent.
        header_bytes: their size in bytes.
    """

    rank: int
    steps: int
    shadowed: int
    joined_at: float
    idle: float
    headers: int
    header_bytes: int


@dataclass(frozen=True)
class JoinReport:
    """All ranks' rows, the same on every rank; ``str()`` of it is a table.

    Attributes:
        ranks: one row a rank; empty for a block with ``enable=False``.
        even: whether all ranks ran out of inputs together.
    """

    ranks: tuple[RankReport, ...] = ()
    even: bool = True

    @classmethod
    def gather(cls, collective: Collective, mine: RankReport, even: bool) -> JoinReport:
        """Collect all rows: one all-reduce of a ``world_size`` x 7 matrix in which each rank fills its own row."""
        rows = torch.zeros(collective.world_size, len(astuple(mine)), dtype=torch.float64)
        rows[mine.rank] = torch.tensor(astuple(mine), dtype=torch.float64)
        collective.all_reduce(rows).wait()
        return cls(tuple(_row(values) for values in cast("list[list[float]]", rows.tolist())), even)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, ready for JSON."""
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


def _row(values: Sequence[float]) -> RankReport:
    rank, steps, shadowed, joined_at, idle, headers, header_bytes = values
    return RankReport(round(rank), round(steps), round(shadowed), joined_at, idle, round(headers), round(header_bytes))

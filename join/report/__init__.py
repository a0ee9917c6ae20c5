"""Report on a ``Join`` block, with one row for each rank: :class:`JoinReport`."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from join.errors import JoinError
from join.report.rank_report import RankReport


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

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draw when each rank was active, how long it waited, and how long its steps took.

        Args:
            path: The file to which the picture is written, too, in the format of its suffix. It is written completely
                or not at all.

        Returns:
            A ``matplotlib.figure.Figure`` with three axes. No window is opened, and pyplot's figures are not touched.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        from join.report.plot import draw, save

        figure = draw(self.ranks)
        if path is not None:
            save(figure, Path(path))
        return figure

    def __str__(self) -> str:
        head = ("rank", "steps", "shadowed", "joined at", "idle", "headers", "bytes")
        body = [
            (str(r.rank), str(r.steps), str(r.shadowed), f"{r.joined_at:.2f} s", f"{r.idle:.2f} s", str(r.headers),
             str(r.header_bytes))
            for r in self.ranks
        ]  # fmt: skip
        widths = [max(len(row[column]) for row in (head, *body)) for column in range(len(head))]
        return "\n".join("  ".join(map(str.rjust, row, widths)) for row in (head, *body))

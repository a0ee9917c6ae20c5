"""What happened in a ``Join`` block, rank by rank: :class:`JoinReport`."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from join.errors import JoinError
from join.report.rank_report import RankReport


@dataclass(frozen=True)
class JoinReport:
    """All ranks' rows, the same on every rank; ``str()`` of it is a table.

    Attributes:
        ranks: one row a rank; empty for a block with ``enable=False``.
        even: whether all ranks ran out of inputs together.
    """

    ranks: tuple[RankReport, ...] = ()
    even: bool = True

    @property
    def steps(self) -> int:
        """How many steps all ranks have made together, which is what one process would have made.

        A counter of the loop, by which a learning rate is set, is the same on all ranks if this is added to it after
        each block.

        Raises:
            JoinError: for a block with ``enable=False``.
        """
        if not self.ranks:
            raise JoinError(
                "report.steps is of all ranks, and with enable=False nobody counts them; count those of the loop [J442]"
            )
        return max(row.steps + row.shadowed for row in self.ranks)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, ready for JSON."""
        return asdict(self)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draw who was active when, how long each rank waited, and how long steps took.

        Args:
            path: also write the picture there, in the format of its suffix; whole or not at all.

        Returns:
            A ``matplotlib.figure.Figure`` of three axes; no window is opened, and pyplot's figures are not touched.

        Raises:
            ImportError: if matplotlib is not installed.
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

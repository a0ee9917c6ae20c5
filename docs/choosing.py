"""Draw which kind of loop to choose: ``python -m docs.choosing`` writes ``docs/pictures/choosing.svg``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docs.order import INK, QUIET, drawn

PICTURE = Path(__file__).parent / "pictures" / "choosing.svg"
QUESTIONS = (
    "Does the loop call collectives of its own?\n(a metric, a barrier, clipping by a reduced norm)",
    "Is a model sharded, or does it compute with\nthe samples of all ranks? (FSDP, SyncBatchNorm)",
    "Does an engine that cannot be listed\ntrain the model? (DeepSpeed, pipelines)",
)
PLAIN, LOCKSTEP = "plain block\nfor x, y in loader:", "join.iterate\nfor x, y in join.iterate(loader):"


def draw(axes: Any) -> None:
    """Draw one question below the other; each yes leads to the right, and the last no to the plain block."""

    def box(x: float, y: float, text: str, colour: str) -> None:
        style = {"boxstyle": "round,pad=0.5", "facecolor": colour, "edgecolor": QUIET, "linewidth": 0.7}
        axes.text(x, y, text, ha="center", va="center", fontsize=9, color=INK, bbox=style)

    def arrow(begin: tuple[float, float], end: tuple[float, float], answer: str) -> None:
        axes.annotate("", end, begin, arrowprops={"arrowstyle": "->", "color": QUIET, "linewidth": 1})
        middle = (begin[0] + end[0]) / 2 + 0.04, (begin[1] + end[1]) / 2 + 0.12
        axes.text(*middle, answer, ha="left", va="center", fontsize=9, color=INK)

    for row, question in enumerate(QUESTIONS):
        box(0, -row, question, "#ffffff")
        arrow((0.74, -row), (1.05, -1 if row == 1 else -0.8 if row == 0 else -1.2), "yes")
        arrow((0, -row - 0.28), (0, -row - 0.72), "no")
    box(0, -len(QUESTIONS), PLAIN, "#d3f9d8")
    box(1.5, -1, LOCKSTEP, "#d0ebff")


if __name__ == "__main__":
    with drawn(PICTURE, (6.4, 4.2), xlim=(-0.75, 2.05), ylim=(-len(QUESTIONS) - 0.4, 0.4)) as picture:
        draw(picture)

"""Draw which kind of loop to choose: ``python -m docs.choosing`` writes ``docs/pictures/choosing.svg``.

The picture is 400 pixels wide, so that it is read in its own size on a telephone.
"""

from __future__ import annotations

from pathlib import Path

PICTURE = Path(__file__).parent / "pictures" / "choosing.svg"
QUESTIONS = (
    ("Does the loop call collectives?", "a metric's all-reduce, a barrier,", "a norm over all ranks"),
    ("Does a forward communicate?", "FSDP, SyncBatchNorm, a loss over", "the samples of all ranks"),
    ("Does an engine own the step?", "DeepSpeed, pipeline parallelism"),
    ("Should all ranks stop together?", 'until="first", without an exception'),
)
"""Each question, and examples in which its answer is yes."""
ITERATE = ("join.iterate", "all ranks run", "the loop body", "equally often,", "with data or", "on dummies")
PLAIN = ("plain block", "the loop stays as it is; a rank that is out of data", "calls the collectives of the others")

INK, QUIET, ASK, LOCKSTEP, BLOCK = "#22313f", "#66737f", "#f1f3f5", "#d0ebff", "#d3f9d8"
WIDTH, LEFT, COLUMN, RIGHT, LINE, GAP = 400, 8, 246, 292, 18, 30  # pixels


def picture() -> str:
    """Return the SVG: one question below the other; each yes leads to the right, and the last no to the plain block."""
    parts: list[str] = []
    y = LEFT
    for question in QUESTIONS:
        height = LINE * len(question) + 12
        parts += [_box(LEFT, y, COLUMN, height, ASK), *_lines(LEFT + COLUMN / 2, y, question)]
        middle = y + height / 2
        parts += [_arrow(LEFT + COLUMN, middle, RIGHT, middle), _label((LEFT + COLUMN + RIGHT) / 2, middle - 5, "yes")]
        parts += [_arrow(LEFT + COLUMN / 2, y + height, LEFT + COLUMN / 2, y + height + GAP)]
        parts += [_label(LEFT + COLUMN / 2 + 14, y + height + 19, "no")]
        y += height + GAP
    first, last = LEFT, y - GAP
    parts.append(_box(RIGHT, first, WIDTH - RIGHT - LEFT, last - first, LOCKSTEP))
    parts += _lines((RIGHT + WIDTH - LEFT) / 2, (first + last - LINE * len(ITERATE) - 12) / 2, ITERATE)
    height = LINE * len(PLAIN) + 12
    parts += [_box(LEFT, y, WIDTH - 2 * LEFT, height, BLOCK), *_lines(WIDTH / 2, y, PLAIN)]
    total = y + height + LEFT
    style = f"text{{font:13px sans-serif;fill:{INK};text-anchor:middle}}.t{{font-weight:bold}}.n{{fill:{QUIET}}}"
    arrow = f'<path d="M0 0L8 4L0 8z" fill="{QUIET}"/>'
    marker = f'<defs><marker id="end" markerWidth="8" markerHeight="8" refX="8" refY="4" orient="auto">{arrow}</marker>'
    size = f'viewBox="0 0 {WIDTH} {total:g}" width="{WIDTH}" height="{total:g}"'
    ground = '<rect width="100%" height="100%" fill="#ffffff"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>{marker}</defs>{ground}'
    return f"{head}{''.join(parts)}</svg>\n"


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {place} rx="6" fill="{colour}" stroke="{QUIET}" stroke-width="0.7"/>'


def _lines(x: float, y: float, lines: tuple[str, ...]) -> list[str]:
    """Return lines of text below ``y``; the first one is bold."""
    kinds = ' class="t"', *[""] * (len(lines) - 1)
    return [
        f'<text x="{x:g}" y="{y + LINE * (at + 1):g}"{kind}>{line}</text>'
        for at, (kind, line) in enumerate(zip(kinds, lines, strict=True))
    ]


def _label(x: float, y: float, text: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="n">{text}</text>'


def _arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{QUIET}" fill="none" marker-end="url(#end)"/>'


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(picture())


if __name__ == "__main__":
    main()

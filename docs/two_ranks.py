"""Draw two ranks with uneven batches, under plain DDP and in a ``Join`` block: ``python -m docs.two_ranks``.

The picture is a sketch of one epoch. ``docs.timeline`` draws a real run.
"""

from __future__ import annotations

from pathlib import Path

PICTURE = Path(__file__).parent / "pictures" / "two_ranks.svg"
INK, QUIET, WHITE = "#22313f", "#66737f", "#ffffff"
STEP, ENDED, WAITS, SHADOWS, SAME = "#b7d9f2", "#e9ecef", "#f8d0b0", "#1864ab", "#2f7a5a"
LEFT, WIDTH, HEIGHT = 60, 92, 26  # pixels: where the bars begin, and the size of one step
FEW, MANY = 2, 5  # batches of rank 0 and of rank 1


def row(name: str, top: int, bars: list[tuple[str, int, str, str]]) -> str:
    """Return one rank's timeline: bars of a text, a length in steps, a colour and the colour of the text."""
    parts, x = [f'<text x="0" y="{top + 17}" style="fill:{QUIET}">{name}</text>'], LEFT
    for text, steps, colour, ink in bars:
        width = steps * WIDTH
        parts.append(f'<rect x="{x}" y="{top}" width="{width - 3}" height="{HEIGHT}" rx="3" fill="{colour}"/>')
        parts.append(f'<text x="{x + width // 2 - 1}" y="{top + 17}" class="m" style="fill:{ink}">{text}</text>')
        x += width
    return "".join(parts)


def picture() -> str:
    """Return both timelines as SVG."""
    batches = [(f"batch {number}", 1, STEP, INK) for number in range(1, MANY + 1)]
    after = ("same state", 1, SAME, WHITE)
    waits = (f"batch {FEW + 1}: the backward waits for rank 0, and hangs", MANY - FEW + 1, WAITS, INK)
    parts = [
        '<text x="0" y="16" class="b">Plain DDP</text>',
        row("rank 0", 26, [*batches[:FEW], ("loop ended", 1, ENDED, QUIET)]),
        row("rank 1", 60, [*batches[:FEW], waits]),
        '<text x="0" y="118" class="b">In a Join block</text>',
        row("rank 0", 128, [*batches[:FEW], *[("shadows", 1, SHADOWS, WHITE)] * (MANY - FEW), after]),
        row("rank 1", 162, [*batches, after]),
    ]
    style = f"text{{font:12px sans-serif;fill:{INK}}}.b{{font-weight:bold}}.m{{text-anchor:middle}}"
    width, height = LEFT + (MANY + 1) * WIDTH, 196
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    ground = f'<rect width="100%" height="100%" fill="{WHITE}"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>{ground}{"".join(parts)}</svg>\n'


if __name__ == "__main__":
    PICTURE.write_text(picture())

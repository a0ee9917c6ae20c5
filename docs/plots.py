"""Draw the tables of ``docs/performance.md`` as bars: ``python -m docs.plots``.

The page is the only place of the figures. A test compares the pictures with the page.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parent
PAGE = DOCS / "performance.md"
PICTURES = {"one machine": DOCS / "pictures" / "cost.svg", "between machines": DOCS / "pictures" / "latency.svg"}
COLOURS = {
    "torch's Join": "#b0bec5",
    "Join": "#1864ab",
    "contributors": "#e8930c",
    "iterate": "#63b995",
}
INK, QUIET = "#22313f", "#66737f"
LEFT, WIDTH, BAR, SCALE = 170, 560, 14, 600  # pixels; SCALE is the length of the time of plain DDP

Row = tuple[str, dict[str, float | None]]


def tables() -> dict[str, list[Row]]:
    """Return the models and the cost of each way, as a ratio to plain DDP; ``None`` if it hangs or was not measured."""
    found: dict[str, list[Row]] = {}
    texts: list[str] = re.findall(r"^\| model,.*?(?=\n\n)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for name, marked in zip(PICTURES, texts, strict=True):
        text = re.sub("[*`]", "", marked)
        head, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
        ways = {at: way for at, cell in enumerate(head) for way in [_way_of(cell)] if way}
        found[name] = [(line[0], {way: _number(line[at]) for at, way in ways.items()}) for line in lines]
    return found


def _way_of(cell: str) -> str:
    if "added" in cell or "plain" in cell:
        return ""
    return next((way for way in COLOURS if way != "Join" and way in cell), "Join")


def _number(cell: str) -> float | None:
    found = re.search(r"\d\.\d+", cell)
    return float(found[0]) if found else None


def picture(rows: list[Row]) -> str:
    """Return an SVG with a bar for each way and model, and a line at the cost of plain DDP."""
    ways = list(rows[0][1])
    parts: list[str] = []
    for at, way in enumerate(ways):
        x = LEFT + at * 110
        parts.append(f'<rect x="{x}" y="8" width="12" height="12" fill="{COLOURS[way]}"/>')
        parts.append(f'<text x="{x + 17}" y="18">{way}</text>')
    y = 40
    for model, costs in rows:
        name, _, time = model.partition(", ")
        parts.append(
            f'<text x="0" y="{y + BAR}">{name}</text><text x="0" y="{y + 2 * BAR}" fill="{QUIET}">{time}</text>'
        )
        for way, cost in costs.items():
            length = 0 if cost is None else max(1.0, (cost - 0.9) * SCALE)
            text = "no" if cost is None else f"{cost:.2f}"
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{length:.0f}" height="{BAR - 2}" fill="{COLOURS[way]}"/>')
            parts.append(f'<text x="{LEFT + length + 5:.0f}" y="{y + 10}" class="n">{text}</text>')
            y += BAR
        y += 12
    plain = LEFT + 0.1 * SCALE
    parts.append(f'<path d="M{plain:.0f} 30V{y - 8}" stroke="{INK}" stroke-dasharray="3 3"/>')
    parts.append(f'<text x="{plain + 4:.0f}" y="{y + 6}" fill="{QUIET}">1.00: plain DDP (bars begin at 0.90)</text>')
    style = f"text{{font:12px sans-serif;fill:{INK}}}.n{{font-size:10px}}"
    size = f'viewBox="0 0 {LEFT + WIDTH} {y + 14}" width="{LEFT + WIDTH}" height="{y + 14}"'
    ground = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>{ground}{"".join(parts)}</svg>\n'


if __name__ == "__main__":
    for name, rows in tables().items():
        PICTURES[name].write_text(picture(rows))

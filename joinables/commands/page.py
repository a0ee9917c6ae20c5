"""A run as one HTML page that needs nothing else: :func:`page_of`.

The tables are made here; the timeline is drawn by the script in ``page.html``, of what stands in the page as JSON.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from joinables.commands.parts import Run
from joinables.commands.waits import Waits, waits_of

_TEMPLATE = Path(__file__).with_name("page.html")
_MANY = 32
"""With more ranks, the table of who waits for whom has only the ranks that were waited for longest."""


def page_of(run: Run) -> str:
    """The page."""
    waits = waits_of(run)
    fields = {
        "TITLE": escape(f"{run.path.name}: {run.world_size} ranks, {run.ended:.2f} s"),
        "REMARKS": "".join(f"<p class=remark>{escape(remark)}</p>" for remark in run.remarks),
        "RANKS": _ranks(run, waits),
        "WAITS": _who_waits(run, waits),
        "LATENCY": _latency(waits),
        "DATA": json.dumps(_data(run, waits)).replace("<", "\\u003c"),  # no tag, whatever names have
    }
    return re.sub(r"{{(\w+)}}", lambda place: fields[place[1]], _TEMPLATE.read_text(encoding="utf-8"))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th scope=col>{escape(each)}</th>" for each in head)
    body = "".join(
        "<tr>" + f"<th scope=row>{escape(first)}</th>" + "".join(f"<td>{escape(each)}</td>" for each in rest) + "</tr>"
        for first, *rest in rows
    )
    return f"<div class=wide><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"


def _ranks(run: Run, waits: Waits) -> str:
    seconds = waits.seconds
    head = ("rank", "announced", "shadowed", "waited for others", "others waited for it", "machine", "ended with")
    rows = [
        (
            str(rank),
            str(part.announced),
            str(part.shadowed),
            _time(sum(each for (by, _), each in seconds.items() if by == rank)),
            _time(sum(each for (_, on), each in seconds.items() if on == rank)),
            f"{part.host}, process {part.process}",
            part.error or "no error",
        )
        for rank, part in run.parts.items()
    ]
    return _table(head, rows)


def _who_waits(run: Run, waits: Waits) -> str:
    seconds = waits.seconds
    if not seconds:
        return "<p>No rank was seen to wait for another.</p>"
    waited_for = {on: sum(each for (_, other), each in seconds.items() if other == on) for _, on in seconds}
    late = sorted(sorted(waited_for, key=lambda on: waited_for[on], reverse=True)[:_MANY])
    rows = [
        [f"rank {rank} waits", *(_time(seconds[rank, on]) if (rank, on) in seconds else "·" for on in late)]
        for rank in run.parts
    ]
    return _table(["", *(f"for rank {on}" for on in late)], rows)


def _latency(waits: Waits) -> str:
    if not waits.latencies:
        return "<p>No rank has waited for a header: none was sent, or all were there when they were read.</p>"
    head = ("rank", "headers it waited for", "median", "longest")
    everything = [each for mine in waits.latencies.values() for each in mine]
    rows = [
        (name, str(len(mine)), _time(statistics.median(mine)), _time(max(mine)))
        for name, mine in [
            *((str(rank), waits.latencies[rank]) for rank in sorted(waits.latencies)),
            ("all", everything),
        ]
    ]
    return _table(head, rows)


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}" if seconds * factor < 1000 else f"{seconds * factor:.0f} {unit}"
    return f"{seconds * 1e6:.0f} µs" if seconds else "0"


def _data(run: Run, waits: Waits) -> dict[str, object]:
    """What the script draws: events are ``[kind, begin, end, text, number, rank waited for, until when]``, in µs."""
    kinds: dict[str, int] = {}
    texts: dict[str, int] = {}
    late = {(wait.rank, wait.event): wait for wait in waits.all}
    ranks: list[dict[str, object]] = []
    for rank, part in run.parts.items():
        rows: list[list[int | None]] = []
        for event in part.events:
            kind = kinds.setdefault(event.kind, len(kinds))
            text = texts.setdefault(event.what, len(texts))
            row = [kind, _micro(event.begin), _micro(event.end), text, event.number]
            wait = late.get((rank, event))
            rows.append(row if wait is None else [*row, wait.on, _micro(wait.came)])
        ranks.append({"rank": rank, "ended": _micro(part.ended), "events": rows})
    return {"kinds": list(kinds), "texts": list(texts), "ended": _micro(run.ended), "ranks": ranks}


def _micro(seconds: float) -> int:
    return round(1e6 * seconds)

"""Picture of a report for ``JoinReport.plot``, by :func:`draw` and :func:`save`. It needs matplotlib."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from join.files import replacing
from join.report.rank_report import EDGES, PER_DECADE, RankReport

_ACTIVE, _SHADOWING, _IDLE = "#334e68", "#c3d0dc", "#d64545"
_MOST_LABELLED = 16
"""With more ranks than this, rows have no numbers and lines have no names."""


def draw(ranks: Sequence[RankReport]) -> Any:
    """Return a figure with three axes: the times at which each rank was active, idle seconds, and step times.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        raise ImportError(
            'report.plot() needs matplotlib, which is not installed. Run pip install "joinables[plot]". [J098]'
        ) from error
    # pyplot would choose a backend and keep the figure, so the figure is made without it.
    figure = figures.Figure(figsize=(10, 5 + 0.2 * min(len(ranks), 2 * _MOST_LABELLED)), layout="constrained")
    axes = figure.subplot_mosaic([["timeline", "timeline"], ["idle", "times"]])
    _draw_timeline(axes["timeline"], ranks)
    _draw_idle(axes["idle"], ranks)
    _draw_step_times(axes["times"], ranks)
    if not ranks:
        figure.suptitle("nothing was recorded: there was one process, or enable=False")
    return figure


def save(figure: Any, path: Path) -> None:
    """Write a figure to a file.

    Raises:
        OSError: If the file cannot be written, such as ``FileNotFoundError`` if the folder does not exist.
        ValueError: If ``path`` is a folder, a device or a pipe.
    """
    with replacing(path) as file:  # so that a reader never sees half a picture
        figure.savefig(file, format=path.suffix.removeprefix(".") or "png", dpi=150)


def _draw_timeline(axis: Any, ranks: Sequence[RankReport]) -> None:
    numbers = [row.rank for row in ranks]
    joined = [row.joined_at for row in ranks]
    rest = [row.ended_at - row.joined_at for row in ranks]
    active = axis.barh(numbers, joined, color=_ACTIVE, label="active, with its own steps")
    shadowing = axis.barh(numbers, rest, left=joined, color=_SHADOWING, label="has run out, with shadowed steps")
    if len(ranks) <= _MOST_LABELLED:
        style = {"label_type": "center", "fontsize": "small"}
        axis.bar_label(active, [str(row.steps or "") for row in ranks], color="white", **style)
        axis.bar_label(shadowing, [str(row.shadowed or "") for row in ranks], **style)
    axis.set(title="Who was active when", xlabel="seconds since entering the block", ylabel="rank")
    axis.yaxis.get_major_locator().set_params(integer=True)
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    if ranks:
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1.08), ncols=2, frameon=False)


def _draw_idle(axis: Any, ranks: Sequence[RankReport]) -> None:
    axis.bar([row.rank for row in ranks], [row.idle for row in ranks], color=_IDLE)
    axis.set(title="Idle", xlabel="rank", ylabel="seconds of waiting for headers")
    axis.xaxis.get_major_locator().set_params(integer=True)


def _draw_step_times(axis: Any, ranks: Sequence[RankReport]) -> None:
    if len(ranks) <= _MOST_LABELLED:
        lines = {f"rank {row.rank}": row.step_times for row in ranks if any(row.step_times)}
    else:
        lines = {"all ranks": [sum(counts) for counts in zip(*(row.step_times for row in ranks), strict=True)]}
    for name, counts in lines.items():
        axis.stairs(counts, EDGES, label=name)
    axis.set(title="Step times", xlabel="from one step to the next", ylabel="steps", xscale="log")
    axis.xaxis.set_major_formatter(importlib.import_module("matplotlib.ticker").EngFormatter("s"))
    axis.xaxis.set_minor_formatter("")
    axis.yaxis.get_major_locator().set_params(integer=True)
    filled = [place for counts in lines.values() for place, count in enumerate(counts) if count]
    if filled:  # whole decades, so that there are labels
        last = max(filled) // PER_DECADE + 1
        axis.set_xlim(EDGES[min(filled) // PER_DECADE * PER_DECADE], EDGES[last * PER_DECADE])
        axis.legend(fontsize="small")
    elif any(row.steps for row in ranks):
        axis.text(0.5, 0.5, "not measured: nothing\nwas announced", ha="center", transform=axis.transAxes)

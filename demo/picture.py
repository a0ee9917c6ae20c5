"""The picture: active ranks, the loss, and the difference to a single process, in each step."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from demo.compare import Outcome
from demo.data import BATCHES, STEPS
from demo.experiment import Experiment, JoinName, drifted
from demo.summary import WHY

INK, QUIET, GRID = "#22313f", "#66737f", "#e4e7eb"
ACTIVE, SHADOWING, ALONE = "#334e68", "#d5dee7", "#b8c4d0"
COLOURS: dict[JoinName, str] = {"torch": "#d64545", "joinables": "#0c8599"}  # this library's line is drawn last, on top
LABELS: dict[JoinName, str] = {"torch": "torch's Join", "joinables": "this library's Join"}
STYLE = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": QUIET,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "ytick.left": False,
    "ytick.minor.left": False,
    "legend.frameon": False,
}


def draw(experiment: Experiment) -> bytes:
    """Return the picture as PNG: a column for each optimizer, its rows over one axis of global steps."""
    outcomes = experiment.outcomes
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(13.5, 8.8), dpi=130, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.1)
        figure.suptitle(
            "The same training on uneven ranks, and in a single process",
            fontsize=16,
            fontweight="bold",
            x=0.012,
            ha="left",
        )
        axes = figure.subplots(3, len(outcomes), sharex="col", sharey="row", height_ratios=(1, 1.3, 1.3), squeeze=False)
        for (optimizer, runs), (timeline, loss, drift) in zip(outcomes.items(), axes.T, strict=True):
            timeline.set_title(f"DDP + {optimizer}", loc="left", fontsize=13, fontweight="bold", pad=36)
            if drifted(runs["torch"]):
                why = WHY[optimizer] if runs["torch"].losses else f"torch's Join {runs['torch'].status}."
                text = timeline.annotate(
                    why, (0, 1), xytext=(1, 23), xycoords="axes fraction", textcoords="offset points", fontsize=9.5
                )
                text.set_in_layout(False)
            _draw_timeline(timeline, experiment.epochs)
            _draw_loss(loss, runs, experiment.losses)
            _draw_drift(drift, runs)
            drift.set_xlabel("global step")
            drift.set_xticks(range(0, len(experiment.losses) + 1, STEPS))
            for axis in (loss, drift):
                axis.grid(axis="y", color=GRID)
                for start in range(STEPS, len(experiment.losses), STEPS):
                    axis.axvline(start, color=QUIET, linewidth=0.8, linestyle=(0, (2, 3)), zorder=0)
        axes[0, 0].set_yticks(range(len(BATCHES)), [f"rank {rank}" for rank in range(len(BATCHES))])
        axes[1, 0].set_ylabel("loss of the global batch")
        axes[2, 0].set_ylabel("largest difference of a\nparameter to a single process")
        _add_legends(figure, axes[1, 0])
        file = io.BytesIO()
        figure.savefig(file, format="png")
    return file.getvalue()


def _draw_timeline(axis: Axes, epochs: int) -> None:
    for epoch in range(epochs):
        start = epoch * STEPS
        axis.text(start + STEPS / 2, -0.6, f"epoch {epoch + 1}", color=QUIET, ha="center", va="bottom", fontsize=9)
        for rank, count in enumerate(BATCHES):
            _draw_bar(axis, rank, start, count, ACTIVE, "white")
            _draw_bar(axis, rank, start + count, STEPS - count, SHADOWING, INK)
    axis.set_xlim(0, epochs * STEPS)
    axis.set_ylim(len(BATCHES) - 0.5, -0.5)
    axis.tick_params(length=0, labelbottom=False)
    axis.spines[:].set_visible(False)


def _draw_bar(axis: Axes, rank: int, start: int, steps: int, colour: str, ink: str) -> None:
    if steps:
        axis.barh(rank, steps, left=start, height=0.74, color=colour, edgecolor="white", linewidth=1.5)
        axis.text(start + steps / 2, rank, str(steps), color=ink, ha="center", va="center", fontsize=9)


def _draw_loss(axis: Axes, runs: Mapping[JoinName, Outcome], alone: Sequence[float]) -> None:
    axis.plot(alone, color=ALONE, linewidth=5, label="a single process")
    for name, colour in COLOURS.items():
        if runs[name].losses:
            axis.plot(runs[name].losses, color=colour, linewidth=1.3, label=LABELS[name])
    axis.set_yscale("log")


def _draw_drift(axis: Axes, runs: Mapping[JoinName, Outcome]) -> None:
    for name, colour in COLOURS.items():
        drift = runs[name].drift
        if drift:
            axis.plot([value or math.nan for value in drift], color=colour, linewidth=2)
            above = name == "torch"  # two lines at the same height need labels at different heights
            axis.annotate(
                f"{LABELS[name]}: {drift[-1]:.0e}", (len(drift) - 1, drift[-1]), xytext=(-4, 7 if above else -7),
                textcoords="offset points", ha="right", va="bottom" if above else "top", color=colour,
                fontweight="bold",
            )  # fmt: skip
    axis.set_yscale("log")
    axis.set_ylim(1e-9, 30)


def _add_legends(figure: Figure, loss: Axes) -> None:
    loss.legend(loc="lower left")
    bars = [
        Patch(color=ACTIVE, label="has a batch"),
        Patch(color=SHADOWING, label="is out of data, shadows the others"),
    ]
    figure.legend(handles=bars, loc="outside upper right", ncols=2, handlelength=1)

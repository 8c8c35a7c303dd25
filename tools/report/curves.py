"""The three figures of a run, as PNG files and as SVG for the page."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.common.atomic_files import write_atomically
from tools.report.run_data import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2937", "#6b7280", "#e5e7eb"
SCORE, FORMAT, ACCURACY = "#2563eb", "#d97706", "#059669"


@dataclass(frozen=True)
class Curve:
    """One line of a figure."""

    metric: str
    label: str
    colour: str


@dataclass(frozen=True)
class Chart:
    """One figure: where it goes, what it says, what it shows."""

    file_name: str
    title: str
    unit: str
    curves: tuple[Curve, ...]
    has_markers: bool = False
    is_score: bool = False


CHARTS = (
    Chart(
        "rewards.png",
        "Reward of training samples",
        "mean of a step",
        (
            Curve("critic/score/mean", "score", SCORE),
            Curve("reward/format", "format", FORMAT),
            Curve("reward/accuracy", "accuracy", ACCURACY),
        ),
        is_score=True,
    ),
    Chart(
        "response_len.png",
        "Response length",
        "tokens, mean of a step",
        (Curve("response_length/mean", "mean", SCORE),),
    ),
    Chart(
        "val_score.png",
        "Validation on held-out problems",
        "mean",
        (
            Curve("val/score", "score", SCORE),
            Curve("val/format", "format", FORMAT),
            Curve("val/accuracy", "accuracy", ACCURACY),
        ),
        has_markers=True,
        is_score=True,
    ),
)


def draw(run: RunData, chart: Chart) -> Figure:
    """The figure, without a window system; curves without data are left out and the figure says when none has any."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7.2, 4.0), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    shown = [curve for curve in chart.curves if run.series(curve.metric)]
    for curve in shown:
        _draw_curve(axes, run, curve, chart.has_markers)
    _label_ends(axes, run, shown, chart.is_score)
    axes.set_title(chart.title, loc="left", color=INK, fontsize=13, fontweight="bold", pad=22)
    axes.text(0, 1.03, chart.unit, transform=axes.transAxes, color=MUTED, fontsize=9)
    axes.set_xlabel("training step", color=MUTED, fontsize=9)
    axes.tick_params(colors=MUTED, labelsize=9, length=0)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if chart.is_score:
        axes.set_ylim(0, 1.02)
    else:
        axes.set_ylim(bottom=0)
    if not shown:
        axes.text(0.5, 0.5, "nothing logged", transform=axes.transAxes, ha="center", color=MUTED)
    return figure


def _draw_curve(axes: Axes, run: RunData, curve: Curve, has_markers: bool) -> None:
    steps, values = zip(*run.series(curve.metric), strict=True)
    marker = "o" if has_markers or len(steps) == 1 else ""
    axes.plot(steps, values, color=curve.colour, linewidth=2.0, marker=marker, markersize=5, solid_capstyle="round")


def _label_ends(axes: Axes, run: RunData, curves: list[Curve], is_score: bool) -> None:
    """Name each line at its right end, moved apart where lines end close together."""
    ends = sorted(((run.series(curve.metric)[-1], curve) for curve in curves), key=lambda end: end[0][1])
    low, high = (0.0, 1.02) if is_score else axes.get_ylim()
    gap, floor = 0.06 * (high - low), float("-inf")
    heights = []
    for (_, value), _curve in ends:
        floor = max(value, floor + gap)
        heights.append(floor)
    overshoot = max(0.0, heights[-1] - high) if heights else 0.0
    for ((step, value), curve), height in zip(ends, heights, strict=True):
        axes.annotate(
            f"{curve.label} {value:.2f}" if is_score else f"{curve.label} {value:.1f}",
            (step, height - overshoot),
            xytext=(8, 0),
            textcoords="offset points",
            color=curve.colour,
            fontsize=9,
            fontweight="bold",
            va="center",
            annotation_clip=False,
        )


def write_png(run: RunData, chart: Chart) -> Path:
    """The figure as ``<run_dir>/<file_name>``, written atomically."""
    path = run.run_dir / chart.file_name
    figure = draw(run, chart)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=150))
    return path


def as_svg(run: RunData, chart: Chart) -> str:
    """The figure as an SVG element for a page, its ids made unique by the chart's name."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.file_name, "font.family": "sans-serif"}):
        draw(run, chart).savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]

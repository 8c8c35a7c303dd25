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
COLOURS = ("#2563eb", "#d97706", "#059669")  # of a chart's curves, in order


@dataclass(frozen=True)
class Chart:
    """One figure; ``curves`` maps the label of each line to its metric."""

    file_name: str
    title: str
    unit: str
    curves: dict[str, str]
    has_markers: bool = False
    is_score: bool = False


CHARTS = (
    Chart(
        "rewards.png",
        "Reward of training samples",
        "mean of a step",
        {"score": "critic/score/mean", "format": "reward/format", "accuracy": "reward/accuracy"},
        is_score=True,
    ),
    Chart("response_len.png", "Response length", "tokens, mean of a step", {"mean": "response_length/mean"}),
    Chart(
        "val_score.png",
        "Validation on held-out problems",
        "mean",
        {"score": "val/score", "format": "val/format", "accuracy": "val/accuracy"},
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
    ends = []  # value, step, label and colour of the last point of each line
    for (label, metric), colour in zip(chart.curves.items(), COLOURS, strict=False):
        if series := run.series(metric):
            steps, values = zip(*series, strict=True)
            marker = "o" if chart.has_markers or len(steps) == 1 else ""
            axes.plot(steps, values, color=colour, linewidth=2.0, marker=marker, markersize=5, solid_capstyle="round")
            ends.append((values[-1], steps[-1], label, colour))
    for change in run.changes if ends else ():
        axes.axvline(change["step"], color=MUTED, linewidth=1.0, linestyle=":", gid=f"change-{change['step']}")
    _label_ends(axes, sorted(ends), chart.is_score)
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
    axes.set_ylim(0, 1.02 if chart.is_score else None)
    if not ends:
        axes.text(0.5, 0.5, "nothing logged", transform=axes.transAxes, ha="center", color=MUTED)
    return figure


def _label_ends(axes: Axes, ends: list[tuple[float, int, str, str]], is_score: bool) -> None:
    """Name each line at its right end, moved apart where lines end close together."""
    low, high = (0.0, 1.02) if is_score else axes.get_ylim()
    gap, floor = 0.06 * (high - low), float("-inf")
    heights = []
    for value, *_ in ends:
        floor = max(value, floor + gap)
        heights.append(floor)
    overshoot = max(0.0, heights[-1] - high) if heights else 0.0
    for (value, step, label, colour), height in zip(ends, heights, strict=True):
        axes.annotate(
            f"{label} {value:.2f}" if is_score else f"{label} {value:.1f}",
            (step, height - overshoot),
            xytext=(8, 0),
            textcoords="offset points",
            color=colour,
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

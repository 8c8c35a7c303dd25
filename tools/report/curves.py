"""The curves of a run, as SVG for the page and some of them as PNG files."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, isnan, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_formats.files import write_atomically
from tools.report.run_data import RunData, changed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2937", "#6b7280", "#e5e7eb"
COLOURS = ("#2563eb", "#d97706", "#059669")  # of a chart's curves, in order
_LINE: dict[str, Any] = {"linewidth": 1.8, "solid_capstyle": "round"}
_LABEL_GAP = 0.075  # between the names of two curves, of the axis
# What a page's style sheet calls them, so that a figure in it is as light or dark as the page.
_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--line", "#ffffff": "--card"}
_CURVES = {colour: f"--curve-{number}" for number, colour in enumerate(COLOURS, start=1)}
Ends = list[tuple[float, int, str, str]]  # last value, its step, name and colour of each curve


@dataclass(frozen=True)
class Chart:
    """One figure; ``curves`` maps the name of each line to its metric. Some also become a PNG file."""

    name: str
    title: str
    unit: str
    curves: dict[str, str]
    form: str = "{:.3g}"
    has_markers: bool = False
    is_score: bool = False
    is_log: bool = False
    has_file: bool = False

    @property
    def file_name(self) -> str:
        return f"{self.name}.png"


CHARTS = (
    Chart(
        "rewards",
        "Reward of training samples",
        "mean of a step",
        {"score": "critic/score/mean", "format": "reward/format", "accuracy": "reward/accuracy"},
        "{:.2f}",
        is_score=True,
        has_file=True,
    ),
    Chart(
        "val_score",
        "Validation on held-out problems",
        "mean",
        {"score": "val/score", "format": "val/format", "accuracy": "val/accuracy"},
        "{:.2f}",
        has_markers=True,
        is_score=True,
        has_file=True,
    ),
    Chart(
        "response_len",
        "Response length",
        "tokens, mean of a step",
        {"mean": "response_length/mean"},
        "{:.1f}",
        has_file=True,
    ),
    Chart(
        "kl",
        "KL divergence",
        "nats per token; the old policy's is 0 with one update a step",
        {
            "from reference": "actor/kl_loss",
            "from old policy": "actor/ppo_kl",
            "in the reward": "actor/reward_kl_penalty",
        },
    ),
    Chart("entropy", "Entropy of the policy", "nats per token", {"entropy": "actor/entropy"}),
    Chart("grad_norm", "Gradient norm", "before clipping", {"norm": "actor/grad_norm"}),
    Chart(
        "clip_fraction",
        "Clipped tokens",
        "share of tokens; 0 with one update a step",
        {"clipped ratio": "actor/pg_clipfrac", "dual clip": "actor/pg_clipfrac_lower"},
    ),
    Chart(
        "gap",
        "Trainer against rollout",
        "difference of the probabilities of sampled tokens",
        {"largest": "training/rollout_probs_diff_max", "mean": "training/rollout_probs_diff_mean"},
        "{:.1e}",
        is_log=True,
    ),
)

# Of runs that have such metrics.
SPECIAL_CHARTS = (
    Chart(
        "turns",
        "Turns of a sample",
        "mean of a step",
        {"turns": "num_turns/mean", "calls": "environment/tool_calls", "failed calls": "environment/failed_calls"},
        "{:.2f}",
    ),
    Chart(
        "turn_seconds",
        "Time of a sample",
        "seconds, mean of a step",
        {"decode": "timing_s/decode/mean", "tools": "timing_s/environment/mean", "waiting": "timing_s/waiting/mean"},
    ),
    Chart(
        "acceptance",
        "Acceptance length",
        "tokens of a sample in a step that verifies drafts",
        {"length": "perf/acceptance_length"},
        "{:.2f}",
    ),
    Chart("mtp_loss", "Loss of the prediction layer", "nats per token", {"depth 1": "actor/mtp_1_loss"}),
)

# What the live page shows of them: each costs time of a machine that trains.
LIVE_CHARTS = (*CHARTS[:3], Chart("seconds", "Time of a step", "seconds", {"step": "timing_s/step"}, "{:.1f}"))


def draw(run: RunData, chart: Chart, size: tuple[float, float] = (4.8, 2.9)) -> Figure:
    """The figure, without a window system.

    A step without a finite number is a gap. Curves without data are left out, and the figure says when none has any.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    ends: Ends = []
    for (label, metric), colour in zip(chart.curves.items(), COLOURS, strict=False):
        if series := run.series(metric):
            steps, values = zip(*run.curve(metric), strict=True)
            marked = range(len(values)) if chart.has_markers else _alone(values)
            axes.plot(steps, values, "o-", markersize=4, markevery=list(marked), color=colour, **_LINE)
            ends.append((series[-1][1], series[-1][0], label, colour))
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    _set_bounds(axes, chart)
    if ends:
        _mark_changes(axes, run)
    _label_ends(axes, sorted(ends), chart)
    axes.set_title(chart.title, loc="left", color=INK, fontsize=12, fontweight="bold", pad=20)
    axes.text(0, 1.03, chart.unit, transform=axes.transAxes, color=MUTED, fontsize=9)
    axes.set_xlabel("training step", color=MUTED, fontsize=9)
    axes.tick_params(which="both", colors=MUTED, labelsize=9, length=0)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
    if not ends:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "nothing logged", transform=axes.transAxes, ha="center", color=MUTED)
    return figure


def _alone(values: Sequence[float]) -> list[int]:
    """The places of values between two gaps, of which no line would show anything."""
    missing = [True, *map(isnan, values), True]
    return [at for at in range(len(values)) if missing[at] and not missing[at + 1] and missing[at + 2]]


def _set_bounds(axes: Axes, chart: Chart) -> None:
    """An axis from 0, with what lies below; of a score to 1 at least. Logarithmic ones have whole powers of ten."""
    values = [float(value) for line in axes.lines for value in np.asarray(line.get_ydata()) if not isnan(value)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    if chart.is_log and low > 0:
        axes.set_yscale("log")
        axes.minorticks_off()
        first = floor(log10(low))
        axes.set_ylim(10.0**first, 10.0 ** max(ceil(log10(high)), first + 1))
        return
    high = max(high, 1.0) if chart.is_score or high == low == 0 else high
    room = 0.04 * (high - min(0.0, low))
    axes.set_ylim(low - room if low < 0 else 0.0, high + room)


def _mark_changes(axes: Axes, run: RunData) -> None:
    """A dotted line before each step from which a resumed run learned from something else, and what that is."""
    left, right = axes.get_xlim()
    for number, change in enumerate(run.changes):
        at = change["step"] - 0.5
        axes.axvline(at, color=MUTED, linewidth=1.0, linestyle=":", gid=f"change-{change['step']}")
        is_right = at > (left + right) / 2
        axes.annotate(
            f"other {' and '.join(changed(change))}",
            (at, 0.02 + _LABEL_GAP * (number % 3)),
            xycoords=("data", "axes fraction"),
            xytext=(-4 if is_right else 4, 0),
            textcoords="offset points",
            ha="right" if is_right else "left",
            color=MUTED,
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
        )


def _label_ends(axes: Axes, ends: Ends, chart: Chart) -> None:
    """Name each line at its right end, moved apart where lines end close together."""
    to_axes = axes.transData + axes.transAxes.inverted()
    heights: list[float] = []
    for value, step, *_ in ends:
        height = float(to_axes.transform((step, value))[1])
        heights.append(max(height, heights[-1] + _LABEL_GAP) if heights else height)
    overshoot = max(0.0, heights[-1] - 1.0) if heights else 0.0
    last = max((step for _, step, *_ in ends), default=0)
    for (value, step, label, colour), height in zip(ends, heights, strict=True):
        when = "" if step == last else f" (step {step})"
        axes.annotate(
            f"{label} {chart.form.format(value)}{when}",
            (last, height - overshoot),
            xycoords=("data", "axes fraction"),
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
    figure = draw(run, chart, size=(7.2, 4.0))
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=150))
    return path


def as_svg(run: RunData, chart: Chart) -> str:
    """The chart's figure as an SVG element for a page."""
    return figure_svg(draw(run, chart), chart.name, _VARIABLES | _CURVES)


def figure_svg(figure: Figure, name: str, variables: Mapping[str, str] = _VARIABLES) -> str:
    """A figure as an SVG element for a page with ``report.css``, its ids made unique by ``name``.

    variables: colour -> the style sheet's name of it.
    """
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    for colour, variable in variables.items():
        text = text.replace(f": {colour}", f": var({variable})")
    return text[text.index("<svg") :]

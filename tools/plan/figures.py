"""The figures of a plan's page as SVG text: memory by phase and owner, seconds by phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tools.plan.devices import GIB
from tools.plan.rank_plan import RankPlan
from tools.plan.timing.cost import StepTime
from tools.report.curves import GRID, INK, MUTED, figure_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LIMIT = "#dc2626"
COLOURS = (
    "#2563eb", "#d97706", "#059669", "#7c3aed", "#db2777", "#0891b2", "#65a30d", "#ea580c", "#475569", "#facc15",
)  # fmt: skip
MIB = 1 << 20
OTHER = "activations, buffers, graphs"


def memory_svg(rank: RankPlan, budget_bytes: int) -> str:
    """A bar for each phase in order, as high as its peak and cut by what lies there, and the line of what a device has;
    words where that is far above them.
    """
    peak = rank.peak.peak_bytes
    columns = {}
    for phase in rank.phases:
        held = {owner: size for owner, size in _merged(phase.held).items() if size > peak / 200}
        columns[phase.name] = held | {OTHER: phase.peak_bytes - sum(held.values())}
    return _bars_svg(f"device memory of rank {rank.rank} by phase", columns, budget_bytes)


def host_svg(stages: Sequence[RankPlan]) -> str:
    """A bar for each stage, cut by what lies on its host."""
    return _bars_svg("host memory by stage", {rank.name: _merged(rank.host_state) for rank in stages})


def time_svg(step: StepTime) -> str:
    """The phases one after another in their colours; lines are between the terms of each."""
    (figure, axes), start = _figure((10, 0.8)), 0.0
    for phase, colour in time_colours(step).items():
        for _, spent in step.dominant(phase, len(step.terms[phase])):
            axes.barh(0, spent, left=start, color=colour, edgecolor="white", linewidth=0.5)
            start += spent
    axes.set_yticks([])
    axes.margins(x=0)
    axes.set_xlabel("seconds of a step", color=MUTED, fontsize=8)
    return figure_svg(figure, "time")


def time_colours(step: StepTime) -> dict[str, str]:
    """Phase -> its colour, of those that take time."""
    return dict(zip((phase for phase, seconds in step.seconds.items() if seconds > 0), COLOURS, strict=False))


def size_text(num_bytes: int) -> str:
    """Bytes for people: GiB, or MiB below one of them."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def _merged(state: Mapping[str, int]) -> dict[str, int]:
    """A tensor and its copy, which an offload makes, count as one owner."""
    found: dict[str, int] = {}
    for owner, size in state.items():
        name = owner.removesuffix(" copy")
        found[name] = found.get(name, 0) + size
    return found


def _bars_svg(name: str, columns: Mapping[str, Mapping[str, int]], budget_bytes: int | None = None) -> str:
    """Stacked bars with a legend; ``columns``: name of a bar -> owner -> bytes."""
    highest = max(sum(column.values()) for column in columns.values())
    unit, unit_name = (GIB, "GiB") if highest > 0.8 * GIB else (MIB, "MiB")
    owners = dict.fromkeys(owner for column in columns.values() for owner in column if owner != OTHER)
    colours = dict(zip(owners, COLOURS, strict=False)) | {OTHER: GRID}

    (figure, axes), below = _figure((4.6, 4.2)), np.zeros(len(columns))
    for owner, colour in colours.items():
        sizes = np.array([column.get(owner, 0) / unit for column in columns.values()])
        if sizes.any():
            axes.bar([*columns], sizes, bottom=below, color=colour, label=owner)
        below += sizes
    if budget_bytes is not None and budget_bytes < 4 * highest:
        axes.axhline(budget_bytes / unit, color=LIMIT, linestyle="--", label="what a device has")
    axes.set_ylabel(unit_name, color=MUTED, fontsize=8)
    axes.tick_params(axis="x", labelrotation=90)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(fontsize=7, labelcolor=INK, frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))
    return figure_svg(figure, name)


def _figure(size: tuple[float, float]) -> tuple[Figure, Axes]:
    """A new figure of so many inches, and its chart."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(colors=MUTED, labelsize=7)
    return figure, axes

"""The figures of a plan's page as SVG text: memory by phase, seconds by phase, bytes by owner."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from tools.plan.devices import GIB
from tools.plan.rank_plan import RankPlan
from tools.plan.timing import StepTime
from tools.report.curves import GRID, INK, MUTED

WIDTH = 520
PEAK, AFTER, LIMIT = "#93c5fd", "#2563eb", "#dc2626"
COLOURS = (
    "#2563eb", "#d97706", "#059669", "#7c3aed", "#db2777", "#0891b2", "#65a30d", "#ea580c", "#475569", "#facc15",
)  # fmt: skip
FONT = 'font-family="system-ui, sans-serif" font-size="10"'


def memory_svg(rank: RankPlan, budget_bytes: int) -> str:
    """A bar for each phase in order, and the line of what a device has."""
    left, top, height, bottom = 40, 14, 170, 112
    most = max(budget_bytes, rank.peak.peak_bytes) * 1.05
    step = (WIDTH - left - 8) / len(rank.phases)

    def y(num_bytes: float) -> float:
        return top + height * (1 - num_bytes / most)

    parts = [_scale(left, most, y)]
    for place, phase in enumerate(rank.phases):
        x = left + place * step
        text = f"{phase.name}: most {phase.peak_bytes / GIB:.2f} GiB, after it {phase.after_bytes / GIB:.2f} GiB"
        colour = LIMIT if phase.peak_bytes > budget_bytes else PEAK
        parts.append(
            f"<g><title>{html.escape(text)}</title>"
            + _bar(x + 2, y(phase.peak_bytes), step - 4, top + height - y(phase.peak_bytes), colour)
            + _bar(x + 2, y(phase.after_bytes), step - 4, top + height - y(phase.after_bytes), AFTER)
            + "</g>"
        )
        middle, low = x + step / 2, top + height + 8
        parts.append(
            f'<text x="{middle:.1f}" y="{low}" {FONT} fill="{MUTED}" text-anchor="end" '
            f'transform="rotate(-55 {middle:.1f} {low})">{html.escape(phase.name)}</text>'
        )
    line = y(budget_bytes)
    parts.append(
        f'<line x1="{left}" x2="{WIDTH}" y1="{line:.1f}" y2="{line:.1f}" stroke="{LIMIT}" stroke-width="1.5" '
        f'stroke-dasharray="5 3"/><text x="{WIDTH - 2}" y="{line - 3:.1f}" {FONT} fill="{LIMIT}" text-anchor="end">'
        f"{budget_bytes / GIB:.1f} GiB</text>"
    )
    return _svg(top + height + bottom, "device memory by phase", parts)


def time_svg(step: StepTime) -> str:
    """The phases one after another; the terms of each as shades of its colour."""
    phases = [(phase, seconds) for phase, seconds in step.seconds.items() if seconds > 0]
    total = sum(seconds for _, seconds in phases) or 1.0
    width, x, parts = 1000, 0.0, []
    for place, (phase, seconds) in enumerate(phases):
        wide, colour = width * seconds / total, COLOURS[place % len(COLOURS)]
        inner = x
        for shade, (term, spent) in enumerate(step.dominant(phase, len(step.terms[phase]))):
            if spent <= 0:
                continue
            part = width * spent / total
            title = f"<title>{html.escape(f'{phase}, {term}: {spent:,.1f} s')}</title>"
            opacity = max(0.35, 1 - 0.16 * shade)
            parts.append(f'<g opacity="{opacity:.2f}">{title}{_bar(inner, 8, part, 34, colour)}</g>')
            inner += part
        error = step.errors.get(phase)
        label = f"{phase} {seconds:,.0f} s" + (f" ± {error.error:.0%}" if error is not None and error.error < 1 else "")
        if wide > 7 * len(label):
            parts.append(f'<text x="{x + 4:.1f}" y="58" {FONT} fill="{INK}">{html.escape(label)}</text>')
        x += wide
    return _svg(66, "phases of a step", parts, width)


def owners_svg(stages: Sequence[tuple[int, Mapping[str, int]]]) -> str:
    """A stacked bar for each stage, with a legend."""
    owners = list(dict.fromkeys(name for _, state in stages for name in state))
    owners = [owner for owner in owners if any(state.get(owner, 0) > GIB // 100 for _, state in stages)] or owners
    left, top, height = 40, 8, 150
    most = max((sum(state.get(owner, 0) for owner in owners) for _, state in stages), default=0) or 1
    step = (WIDTH - left - 8) / max(1, len(stages))

    def y(num_bytes: float) -> float:
        return top + height * (1 - num_bytes / most)

    parts = [_scale(left, most, y)]
    for place, (stage, state) in enumerate(stages):
        x, below = left + place * step, 0
        for number, owner in enumerate(owners):
            size = state.get(owner, 0)
            if size:
                title = f"<title>{html.escape(f'stage {stage}, {owner}: {size / GIB:.2f} GiB')}</title>"
                colour = COLOURS[number % len(COLOURS)]
                bar = _bar(x + 3, y(below + size), step - 6, y(below) - y(below + size), colour)
                parts.append(f"<g>{title}{bar}</g>")
                below += size
        parts.append(
            f'<text x="{x + step / 2:.1f}" y="{top + height + 12}" {FONT} fill="{MUTED}" '
            f'text-anchor="middle">{stage}</text>'
        )
    for number, owner in enumerate(owners):
        x, low = left + 160 * (number % 3), top + height + 30 + 15 * (number // 3)
        parts.append(_bar(x, low - 8, 9, 9, COLOURS[number % len(COLOURS)]))
        parts.append(f'<text x="{x + 13}" y="{low}" {FONT} fill="{INK}">{html.escape(owner)}</text>')
    return _svg(top + height + 36 + 15 * -(-len(owners) // 3), "bytes by owner and stage", parts)


def _scale(left: int, most: float, y: object) -> str:
    """Grid lines at round numbers of GiB."""
    assert callable(y)
    unit = next((size for size in (0.01, 0.05, 0.25, 1, 5, 10, 20, 50, 100, 250) if most / GIB / size <= 6), 500)
    parts, value = [], 0.0
    while value <= most / GIB:
        height = y(value * GIB)
        parts.append(
            f'<line x1="{left}" x2="{WIDTH}" y1="{height:.1f}" y2="{height:.1f}" stroke="{GRID}"/>'
            f'<text x="{left - 4}" y="{height + 3:.1f}" {FONT} fill="{MUTED}" text-anchor="end">{value:g}</text>'
        )
        value += unit
    return "".join(parts)


def _bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{max(0.0, height):.1f}" fill="{colour}"/>'
    )


def _svg(height: float, label: str, parts: Sequence[str], width: int = WIDTH) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" role="img" '
        f'aria-label="{html.escape(label)}" width="100%">{"".join(parts)}</svg>'
    )

"""The figures of a plan's page as SVG text: memory by phase, seconds by phase, bytes by owner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from tools.plan.devices import GIB
from tools.plan.rank_plan import RankPlan
from tools.plan.timing import StepTime
from tools.report.curves import GRID, INK, MUTED

WIDTH, LEFT, TOP, HEIGHT = 520, 40, 14, 160  # of a column chart, and where its columns are
PEAK, AFTER, LIMIT = "#93c5fd", "#2563eb", "#dc2626"
COLOURS = (
    "#2563eb", "#d97706", "#059669", "#7c3aed", "#db2777", "#0891b2", "#65a30d", "#ea580c", "#475569", "#facc15",
)  # fmt: skip
FONT = 'font-family="system-ui, sans-serif" font-size="10"'
UNITS_GIB = (0.01, 0.05, 0.25, 1, 5, 10, 20, 50, 100, 250, 500)
Bar = tuple[str, list[tuple[int, int, str]]]  # a title; and (first byte, end, colour) of each rectangle


def memory_svg(rank: RankPlan, budget_bytes: int) -> str:
    """A bar for each phase in order, and the line of what a device has."""
    columns: list[tuple[str, list[Bar]]] = []
    for phase in rank.phases:
        title = f"{phase.name}: most {phase.peak_bytes / GIB:.2f} GiB, after it {phase.after_bytes / GIB:.2f} GiB"
        colour = LIMIT if phase.peak_bytes > budget_bytes else PEAK
        columns.append((phase.name, [(title, [(0, phase.peak_bytes, colour), (0, phase.after_bytes, AFTER)])]))
    most = max(budget_bytes, rank.peak.peak_bytes) * 1.05
    line = TOP + HEIGHT * (1 - budget_bytes / most)
    limit = (
        f'<line x1="{LEFT}" x2="{WIDTH}" y1="{line:.1f}" y2="{line:.1f}" stroke="{LIMIT}" stroke-width="1.5" '
        f'stroke-dasharray="5 3"/>{_text(WIDTH - 2, line - 3, f"{budget_bytes / GIB:.1f} GiB", "end", LIMIT)}'
    )
    return _svg(TOP + HEIGHT + 112, "device memory by phase", _columns(columns, most, slant=-55) + limit)


def owners_svg(stages: Sequence[tuple[int, Mapping[str, int]]]) -> str:
    """A stacked bar for each stage, with a legend."""
    owners = list(dict.fromkeys(name for _, state in stages for name in state))
    owners = [owner for owner in owners if any(state.get(owner, 0) > GIB // 100 for _, state in stages)] or owners
    colours = {owner: COLOURS[number % len(COLOURS)] for number, owner in enumerate(owners)}
    columns: list[tuple[str, list[Bar]]] = []
    most = 1
    for stage, state in stages:
        bars: list[Bar] = []
        below = 0
        for owner, colour in colours.items():
            size = state.get(owner, 0)
            if size:
                title = f"stage {stage}, {owner}: {size / GIB:.2f} GiB"
                bars.append((title, [(below, below + size, colour)]))
                below += size
        columns.append((str(stage), bars))
        most = max(most, below)
    legend = ""
    for number, (owner, colour) in enumerate(colours.items()):
        x, low = LEFT + 160 * (number % 3), TOP + HEIGHT + 30 + 15 * (number // 3)
        legend += _rect(x, low - 8, 9, 9, colour) + _text(x + 13, low, owner, "start", INK)
    height = TOP + HEIGHT + 36 + 15 * -(-len(owners) // 3)
    return _svg(height, "bytes by owner and stage", _columns(columns, most) + legend)


def time_svg(step: StepTime) -> str:
    """The phases one after another; the terms of each as shades of its colour."""
    phases = [(phase, seconds) for phase, seconds in step.seconds.items() if seconds > 0]
    scale = 1000 / (sum(seconds for _, seconds in phases) or 1.0)
    x, body = 0.0, ""
    for number, (phase, seconds) in enumerate(phases):
        inner = x
        for shade, (term, spent) in enumerate(step.dominant(phase, len(step.terms[phase]))):
            if spent > 0:
                bar = _rect(inner, 8, scale * spent, 34, COLOURS[number % len(COLOURS)])
                title = f"<title>{escape(f'{phase}, {term}: {spent:,.1f} s')}</title>"
                body += f'<g opacity="{max(0.35, 1 - 0.16 * shade):.2f}">{title}{bar}</g>'
                inner += scale * spent
        error = step.errors.get(phase)
        label = f"{phase} {seconds:,.0f} s" + (f" ± {error.error:.0%}" if error is not None and error.error < 1 else "")
        if scale * seconds > 7 * len(label):
            body += _text(x + 4, 58, label, "start", INK)
        x += scale * seconds
    return _svg(66, "phases of a step", body, 1000)


def _columns(columns: Sequence[tuple[str, list[Bar]]], most: float, slant: int = 0) -> str:
    """Columns with their labels below, and grid lines at round numbers of GiB."""

    def y(num_bytes: float) -> float:
        return TOP + HEIGHT * (1 - num_bytes / most)

    unit = next((size for size in UNITS_GIB if most / GIB / size <= 6), UNITS_GIB[-1])
    body = ""
    for number in range(int(most / GIB / unit) + 1):
        height = y(number * unit * GIB)
        body += f'<line x1="{LEFT}" x2="{WIDTH}" y1="{height:.1f}" y2="{height:.1f}" stroke="{GRID}"/>'
        body += _text(LEFT - 4, height + 3, f"{number * unit:g}", "end")
    width = (WIDTH - LEFT - 8) / max(1, len(columns))
    for number, (label, bars) in enumerate(columns):
        x = LEFT + number * width
        for title, rectangles in bars:
            shown = (_rect(x + 2, y(end), width - 4, y(start) - y(end), colour) for start, end, colour in rectangles)
            body += f"<g><title>{escape(title)}</title>{''.join(shown)}</g>"
        body += _text(
            x + width / 2, TOP + HEIGHT + (8 if slant else 12), label, "end" if slant else "middle", slant=slant
        )
    return body


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    size = f'width="{max(0.0, width):.1f}" height="{max(0.0, height):.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str, colour: str = MUTED, slant: int = 0) -> str:
    turn = f' transform="rotate({slant} {x:.1f} {y:.1f})"' if slant else ""
    position = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}'
    return f'<text {position} {FONT} fill="{colour}">{escape(text)}</text>'


def _svg(height: float, label: str, body: str, width: int = WIDTH) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" role="img" '
        f'aria-label="{escape(label)}" width="100%">{body}</svg>'
    )

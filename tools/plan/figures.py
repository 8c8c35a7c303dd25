"""The figures of a plan's page as SVG text: memory by phase and by owner, seconds by phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from tools.plan.devices import GIB
from tools.plan.rank_plan import RankPlan
from tools.plan.timing import StepTime
from tools.report.curves import GRID, INK, MUTED

WIDTH, LEFT, TOP, HEIGHT = 440, 36, 18, 140  # of a column chart, and where its columns are
PEAK, AFTER, LIMIT = "#93c5fd", "#2563eb", "#dc2626"
COLOURS = (
    "#2563eb", "#d97706", "#059669", "#7c3aed", "#db2777", "#0891b2", "#65a30d", "#ea580c", "#475569", "#facc15",
)  # fmt: skip
FONT = 'font-family="system-ui, sans-serif" font-size="10"'
UNITS = (0.01, 0.05, 0.25, 1, 2, 5, 10, 20, 50, 100, 250, 500)  # of GiB or MiB between two lines
MIB = 1 << 20
OTHER = "activations, buffers, graphs"
Bar = tuple[str, list[tuple[int, int, str]]]  # a title; and (first byte, end, colour) of each rectangle


def memory_svg(rank: RankPlan, budget_bytes: int) -> str:
    """A bar for each phase in order, and the line of what a device has."""
    columns: list[tuple[str, list[Bar]]] = []
    for phase in rank.phases:
        title = f"{phase.name}: most {size_text(phase.peak_bytes)}, after it {size_text(phase.after_bytes)}"
        colour = LIMIT if phase.peak_bytes > budget_bytes else PEAK
        columns.append((phase.name, [(title, [(0, phase.peak_bytes, colour), (0, phase.after_bytes, AFTER)])]))
    return _phases_svg("device memory by phase", columns, rank, budget_bytes)


def holders_svg(rank: RankPlan, budget_bytes: int) -> str:
    """The bars of ``memory_svg``, each cut by what lies there, with a legend."""
    phases = [(phase, _merged(phase.held)) for phase in rank.phases]
    least = rank.peak.peak_bytes / 200
    owners = list(dict.fromkeys(owner for _, held in phases for owner, size in held.items() if size > least))
    colours = dict(zip(owners, COLOURS, strict=False))
    columns: list[tuple[str, list[Bar]]] = []
    for phase, held in phases:
        sizes = {owner: held.get(owner, 0) for owner in colours}
        sizes[OTHER] = phase.peak_bytes - sum(sizes.values())
        columns.append((phase.name, _stacked(phase.name, sizes, colours | {OTHER: GRID})))
    legend = colours | {OTHER: GRID}
    return _phases_svg("device memory by owner", columns, rank, budget_bytes, legend)


def owners_svg(stages: Sequence[tuple[int, Mapping[str, int]]]) -> str:
    """A stacked bar for each stage, with a legend."""
    states = [(stage, _merged(state)) for stage, state in stages]
    most = max(1, *(sum(state.values()) for _, state in states))
    owners = list(dict.fromkeys(name for _, state in states for name, size in state.items() if size > most / 200))
    colours = dict(zip(owners, COLOURS, strict=False))
    columns = [(str(stage), _stacked(f"stage {stage}", state, colours)) for stage, state in states]
    low = TOP + HEIGHT + 30
    body = _columns(columns, 1.05 * most) + _text(LEFT, low, "pipeline stage", "start") + _legend(colours, low + 18)
    return _svg(low + 24 + 15 * -(-len(owners) // 2), "bytes by owner and stage", body)


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


def _stacked(label: str, sizes: Mapping[str, int], colours: Mapping[str, str]) -> list[Bar]:
    bars: list[Bar] = []
    below = 0
    for owner, colour in colours.items():
        if size := sizes.get(owner, 0):
            bars.append((f"{label}, {owner}: {size_text(size)}", [(below, below + size, colour)]))
            below += size
    return bars


def _phases_svg(
    label: str,
    columns: Sequence[tuple[str, list[Bar]]],
    rank: RankPlan,
    budget_bytes: int,
    legend: Mapping[str, str] | None = None,
) -> str:
    """Columns of phases with the line of what a device has, or words where that is far above them."""
    peak, low = rank.peak.peak_bytes, TOP + HEIGHT + 122
    is_near = budget_bytes < 4 * peak
    most = 1.05 * (max(budget_bytes, peak) if is_near else peak)
    height, text = TOP - 4.0, f"a device has {size_text(budget_bytes)}"
    line = ""
    if is_near:
        height, text = TOP + HEIGHT * (1 - budget_bytes / most), size_text(budget_bytes)
        line = (
            f'<line x1="{LEFT}" x2="{WIDTH}" y1="{height:.1f}" y2="{height:.1f}" stroke="{LIMIT}" '
            'stroke-width="1.5" stroke-dasharray="5 3"/>'
        )
    body = _columns(columns, most, slant=-55) + line + _text(WIDTH - 2, height - 3, text, "end", LIMIT)
    if legend is None:
        return _svg(TOP + HEIGHT + 112, label, body)
    return _svg(low + 6 + 15 * -(-len(legend) // 2), label, body + _legend(legend, low))


def _legend(colours: Mapping[str, str], low: float) -> str:
    """Two names in a row."""
    body = ""
    for number, (owner, colour) in enumerate(colours.items()):
        x, y = LEFT + 200 * (number % 2), low + 15 * (number // 2)
        body += _rect(x, y - 8, 9, 9, colour) + _text(x + 13, y, owner, "start", INK)
    return body


def time_svg(step: StepTime) -> str:
    """The phases one after another; the terms of each as shades of its colour."""
    x, body = 0.0, ""
    colours = time_colours(step)
    scale = 1000 / (sum(step.seconds[phase] for phase in colours) or 1.0)
    for phase, colour in colours.items():
        for shade, (term, spent) in enumerate(step.dominant(phase, len(step.terms[phase]))):
            if spent > 0:
                title = f"<title>{escape(f'{phase}, {term}: {spent:,.1f} s')}</title>"
                bar = _rect(x, 4, scale * spent, 34, colour)
                body += f'<g opacity="{max(0.35, 1 - 0.16 * shade):.2f}">{title}{bar}</g>'
                x += scale * spent
    return _svg(42, "phases of a step", body, 1000)


def time_colours(step: StepTime) -> dict[str, str]:
    """Phase -> its colour, of those that take time."""
    return dict(zip((phase for phase, seconds in step.seconds.items() if seconds > 0), COLOURS, strict=False))


def _columns(columns: Sequence[tuple[str, list[Bar]]], most: float, slant: int = 0) -> str:
    """Columns with their labels below, and grid lines at round numbers of GiB or MiB."""

    def y(num_bytes: float) -> float:
        return TOP + HEIGHT * (1 - num_bytes / most)

    one, name = (GIB, "GiB") if most > 0.8 * GIB else (MIB, "MiB")
    unit = next((size for size in UNITS if most / one / size <= 6), UNITS[-1])
    body = _text(LEFT - 4, TOP - 4, name, "end")
    for number in range(int(most / one / unit) + 1):
        height = y(number * unit * one)
        body += f'<line x1="{LEFT}" x2="{WIDTH}" y1="{height:.1f}" y2="{height:.1f}" stroke="{GRID}"/>'
        if height > TOP + 8:  # the unit is above
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

"""``--page plan.html``: the plan on one page without other files; figures are inline SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from hf_formats.files import write_text
from tools.plan.devices import GIB
from tools.plan.figures import host_svg, memory_svg, size_text, time_colours, time_svg
from tools.plan.rank_plan import RankPlan
from tools.plan.tables import TextTable, call_table, launch_table, layout_text, phase_table, state_table, time_table
from tools.plan.timing.cost import StepTime
from tools.plan.whole import PROCESS_BYTES, WholePlan
from tools.report.page import page_style, tiles

FACTS = TextTable(
    "How sure it is",
    ("", ""),
    [
        (
            "exact",
            "weights, gradients, optimizer state, KV cache, and when they are in memory: the run's own code on shapes",
        ),
        ("exact", "every call to other ranks, its order, its bytes"),
        (
            "planned",
            "activations and buffers: allocations of the run's own code; the workspace of vendors' kernels is not "
            "known",
        ),
        ("modelled", "what driver, communicators and a worker's process take; seconds of every phase"),
    ],
)


def write_page(plan: WholePlan, step: StepTime, path: Path) -> None:
    """Writes the page whole or not at all."""
    body = _head(plan, step)
    if plan.problems:
        lines = "".join(f"<li>{escape(problem)}</li>" for problem in plan.problems)
        body += f'<h2>What stops it</h2><div class="card"><ul>{lines}</ul></div>'
    if plan.stages:
        body += _memory(plan)
    body += _table(time_table(step), time_svg(step), time_colours(step))
    body += f"<p>{escape(step.speculation)}</p>" if step.speculation else ""
    if plan.stages:
        body += _table(call_table(plan))
        body += _table(launch_table(plan, step)) if plan.worst.launches else ""
    body += _table(FACTS)
    style = page_style() + ".swatch { display: inline-block; width: 10px; height: 10px; margin-right: 8px; }"
    text = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(plan.run.name)}: plan</title><style>{style}</style></head><body><main>{body}</main></body>"
        "</html>\n"
    )
    write_text(path, text)


def _head(plan: WholePlan, step: StepTime) -> str:
    config = plan.run.config
    cells = [("devices", f"{config.num_devices:,}")]
    if plan.stages:
        cells.append(("stays free of a device", size_text(plan.headroom_bytes)))
        cells.append(("parameters", _count(plan.num_parameters)))
        cells.append(("host memory, fullest node", f"{plan.host_bytes / GIB:,.0f} GiB"))
    cells.append(("a step, modelled", f"{step.total_s:,.0f} s"))
    cells.append(("tokens/s/device", f"{step.tokens_per_s_device:,.1f}"))
    verdict = '<span class="badge">does not work</span>' if plan.problems else '<span class="badge good">fits</span>'
    return (
        f"<h1>{escape(plan.run.name)} {verdict}</h1>"
        f'<div class="muted">{escape(plan.run.device.name)}; training {layout_text(plan.layout)}, rollout '
        f"TP{config.actor_rollout_ref.rollout.tensor_model_parallel_size}; rows of {plan.size.prompt_length} + "
        f"{plan.size.response_length} tokens</div>{tiles(cells)}"
    )


def _count(number: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M")):
        if number >= unit:
            return f"{number / unit:,.1f} {name}"
    return f"{number:,}"


def _memory(plan: WholePlan) -> str:
    """The phases of each stage by owner, and the tables of both."""
    budget = plan.run.device.budget_bytes
    figures = ""
    for first, last, rank in _alike(plan.stages):
        which = f"{first} to {last}" if last != first else first
        fullest = f"rank {rank.rank}, fullest in {escape(rank.peak.name)}: {size_text(rank.peak.peak_bytes)}"
        title = f'<div><b>{which}</b> <span class="muted small">{fullest}</span></div>'
        figures += f'<div class="card">{title}{memory_svg(rank, budget)}</div>'
    is_host = plan.run.device.family == "cpu"  # whose devices are the host
    if not is_host and any(rank.host_bytes for rank in plan.stages):
        note = f"of one rank of each stage; {PROCESS_BYTES / GIB:.0f} GiB of its process not counted"
        figures += f'<div class="card"><b>Host</b> <span class="muted small">{note}</span>{host_svg(plan.stages)}</div>'
    return (
        "<h2>Memory over a step</h2>"
        '<p class="muted small">A bar is a phase, as high as its most, by what lies there; a device has '
        f"{size_text(budget)}. Stages that differ by less than 3% share a figure, which is that of the fullest.</p>"
        f'<div class="charts">{figures}</div>{_table(phase_table(plan))}{_table(state_table(plan))}'
    )


def _alike(stages: Sequence[RankPlan]) -> list[tuple[str, str, RankPlan]]:
    """Runs of stages whose phases differ by less than 3% of the peak: first, last, and the fullest one's plan."""
    runs: list[list[RankPlan]] = []
    for rank in stages:
        pairs = zip(runs[-1][0].phases, rank.phases, strict=False) if runs else ()
        near = [abs(x.peak_bytes - y.peak_bytes) < 0.03 * rank.peak.peak_bytes for x, y in pairs]
        if runs and all(near) and rank.coords is not None:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return [(run[0].name, run[-1].name, max(run, key=lambda each: each.peak.peak_bytes)) for run in runs]


def _table(table: TextTable, figure: str = "", colours: Mapping[str, str] | None = None) -> str:
    """A table below its figure; a row whose first cell has a colour there shows it."""
    kinds = [' class="num"' if table.is_number(index) else "" for index in range(len(table.columns))]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for kind, name in zip(kinds, table.columns, strict=True))
    rows = ""
    for row in table.rows:
        cells = zip(kinds, row, strict=True)
        shown = (f"<td{kind}>{_swatch(colours or {}, cell)}{escape(cell)}</td>" for kind, cell in cells)
        rows += f"<tr>{''.join(shown)}</tr>"
    head = f"<tr>{head}</tr>" if any(table.columns) else ""
    return f'<h2>{escape(table.title)}</h2><div class="card">{figure}<table>{head}{rows}</table></div>'


def _swatch(colours: Mapping[str, str], cell: str) -> str:
    return f'<span class="swatch" style="background:{colours[cell]}"></span>' if cell in colours else ""

"""``--page plan.html``: the plan on one page without other files; figures are inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from recipes.common.atomic_files import write_text_atomically
from tools.plan.devices import GIB
from tools.plan.figures import memory_svg, owners_svg, time_svg
from tools.plan.rank_plan import RankPlan
from tools.plan.tables import TextTable, call_table, launch_table, layout_text, time_table
from tools.plan.timing import StepTime
from tools.plan.whole import WholePlan
from tools.report.page import page_style

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
    body += _table(time_table(step), time_svg(step))
    if plan.stages:
        body += _owners(plan) + _table(call_table(plan))
        body += _table(launch_table(plan, step)) if plan.worst.launches else ""
    body += _table(FACTS)
    style = page_style() + "td.num, th.num { text-align: right; }"
    text = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(plan.run.name)}: plan</title><style>{style}</style></head><body><main>{body}</main></body>"
        "</html>\n"
    )
    write_text_atomically(path, text)


def _head(plan: WholePlan, step: StepTime) -> str:
    config = plan.run.config
    tiles = [("devices", f"{config.trainer.world_size:,}")]
    if plan.stages:
        tiles.append(("stays free", f"{plan.headroom_bytes / GIB:.1f} GiB"))
        tiles.append(("parameters", f"{plan.num_parameters / 1e9:,.1f} B"))
        tiles.append(("host memory, fullest node", f"{plan.host_bytes / GIB:,.0f} GiB"))
    tiles.append(("a step, modelled", f"{step.total_s:,.0f} s"))
    tiles.append(("tokens/s/device", f"{step.tokens_per_s_device:,.1f}"))
    cells = "".join(
        f'<div class="tile"><span class="muted small">{what}</span><b>{value}</b></div>' for what, value in tiles
    )
    verdict = '<span class="badge">does not work</span>' if plan.problems else '<span class="badge good">fits</span>'
    return (
        f"<h1>{escape(plan.run.name)} {verdict}</h1>"
        f'<div class="muted">{escape(plan.run.device.name)}; training {layout_text(plan.layout)}, rollout '
        f"TP{config.actor_rollout_ref.rollout.tensor_model_parallel_size}; rows of {plan.size.prompt_length} + "
        f'{plan.size.response_length} tokens</div><div class="tiles">{cells}</div>'
    )


def _memory(plan: WholePlan) -> str:
    figures = "".join(
        f'<div class="card"><div><b>Stage {rank.coords.pp}</b> <span class="muted small">rank {rank.rank}, fullest in '
        f"{escape(rank.peak.name)}: {rank.peak.peak_bytes / GIB:.1f} GiB</span></div>"
        f"{memory_svg(rank, plan.run.device.budget_bytes)}</div>"
        for rank in _different(plan.stages)
    )
    return (
        "<h2>Device memory over a step</h2>"
        '<p class="muted small">Each bar is a phase: dark what lies there after it, light the most while it goes on; '
        f"the line is what a device has, {plan.run.device.budget_bytes / GIB:.1f} GiB. "
        "Stages that look like the one before are left out.</p>"
        f'<div class="charts">{figures}</div>'
    )


def _different(stages: Sequence[RankPlan]) -> list[RankPlan]:
    """The stages without those whose phases differ by less than 1% of the peak from the one shown before."""
    shown = [stages[0]]
    for rank in stages[1:]:
        pairs = zip(shown[-1].phases, rank.phases, strict=True)
        if any(abs(x.peak_bytes - y.peak_bytes) > 0.01 * rank.peak.peak_bytes for x, y in pairs):
            shown.append(rank)
    return shown


def _owners(plan: WholePlan) -> str:
    cards = (
        ("Device", "each while it is there, not all at one time", [rank.device_state for rank in plan.stages]),
        ("Host", "of each rank", [rank.host_state for rank in plan.stages]),
    )
    figures = "".join(
        f'<div class="card"><b>{where}</b> <span class="muted small">{note}</span>'
        f"{owners_svg([(rank.coords.pp, state) for rank, state in zip(plan.stages, states, strict=True)])}</div>"
        for where, note, states in cards
    )
    return f'<h2>Who holds it</h2><div class="charts">{figures}</div>'


def _table(table: TextTable, figure: str = "") -> str:
    kinds = [' class="num"' if table.is_number(index) else "" for index in range(len(table.columns))]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for kind, name in zip(kinds, table.columns, strict=True))
    rows = "".join(
        "<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in table.rows
    )
    head = f"<tr>{head}</tr>" if any(table.columns) else ""
    return f'<h2>{escape(table.title)}</h2><div class="card">{figure}<table>{head}{rows}</table></div>'

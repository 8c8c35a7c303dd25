"""``--page plan.html``: the plan on one page that needs nothing beside it; figures are inline SVG."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from recipes.common.atomic_files import write_text_atomically
from tools.plan.devices import GIB
from tools.plan.figures import memory_svg, owners_svg, time_svg
from tools.plan.rank_plan import RankPlan
from tools.plan.timing import StepTime
from tools.plan.timing.show import phase_rows
from tools.plan.whole import WholePlan
from tools.report.page import page_style

FACTS = (
    (
        "exact",
        "weights, gradients, optimizer state, KV cache, their place and time: made by the run's own code on shapes",
    ),
    ("exact", "every call to other ranks, its order, its bytes"),
    (
        "planned",
        "activations and buffers: allocations of the run's own code; what vendors' kernels take beside is not known",
    ),
    ("modelled", "what driver, communicators and a worker's process take; seconds of every phase"),
)


def write_page(plan: WholePlan, step: StepTime | None, path: Path) -> None:
    """Writes the page whole or not at all."""
    write_text_atomically(path, render(plan, step))


def render(plan: WholePlan, step: StepTime | None) -> str:
    """The page."""
    name = html.escape(plan.run.name)
    body = "".join(
        [_head(plan, step), _problems(plan), _memory(plan), _time(step), _owners(plan), _calls(plan), _facts()]
    )
    style = page_style() + ".charts.one { grid-template-columns: 1fr; } td.num, th.num { text-align: right; }"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}: plan</title><style>{style}</style></head><body><main>{body}</main></body></html>\n"
    )


def _head(plan: WholePlan, step: StepTime | None) -> str:
    config, device = plan.run.config, plan.run.device
    layout = plan.layout
    rollout = config.actor_rollout_ref.rollout
    tiles = [("devices", f"{config.trainer.world_size:,}")]
    if plan.stages:
        tiles.append(("stays free", f"{plan.headroom_bytes / GIB:.1f} GiB"))
        tiles.append(("parameters", f"{plan.num_parameters / 1e9:,.1f} B"))
        tiles.append(("host memory, fullest node", f"{plan.host_bytes / GIB:,.0f} GiB"))
    if step is not None:
        tiles.append(("a step, modelled", f"{step.total_s:,.0f} s"))
        tiles.append(("tokens/s/device", f"{step.tokens_per_s_device:,.1f}"))
    cells = "".join(
        f'<div class="tile"><span class="muted small">{what}</span><b>{value}</b></div>' for what, value in tiles
    )
    verdict = '<span class="badge">does not work</span>' if plan.problems else '<span class="badge good">fits</span>'
    return (
        f"<h1>{html.escape(plan.run.name)} {verdict}</h1>"
        f'<div class="muted">{html.escape(device.name)}; training TP{layout.tensor_model_parallel_size} '
        f"PP{layout.pipeline_model_parallel_size} CP{layout.context_parallel_size} DP{layout.data_parallel_size} "
        f"EP{layout.expert_model_parallel_size} ETP{layout.expert_tensor_parallel_size}, rollout "
        f"TP{rollout.tensor_model_parallel_size}; rows of {plan.size.prompt_length} + {plan.size.response_length} "
        f'tokens</div><div class="tiles">{cells}</div>'
    )


def _problems(plan: WholePlan) -> str:
    if not plan.problems:
        return ""
    lines = "".join(f"<li>{html.escape(problem)}</li>" for problem in plan.problems)
    return f'<h2>What stops it</h2><div class="card"><ul>{lines}</ul></div>'


def _memory(plan: WholePlan) -> str:
    if not plan.stages:
        return ""
    figures = "".join(
        f'<div class="card"><div><b>Stage {rank.coords.pp}</b> <span class="muted small">rank {rank.rank}, fullest in '
        f"{html.escape(rank.peak.name)}: {rank.peak.peak_bytes / GIB:.1f} GiB</span></div>"
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
    """Without those whose phases differ by less than 1% of the peak from the one shown before."""
    shown: list[RankPlan] = []
    for rank in stages:
        before = shown[-1] if shown else None
        pairs = zip(before.phases, rank.phases, strict=True) if before is not None else []
        if before is None or any(abs(x.peak_bytes - y.peak_bytes) > 0.01 * rank.peak.peak_bytes for x, y in pairs):
            shown.append(rank)
    return shown


def _time(step: StepTime | None) -> str:
    if step is None:
        return ""
    rows = "".join(
        f'<tr><td>{html.escape(phase)}</td><td class="num">{seconds}</td><td>{html.escape(error)}</td>'
        f"<td>{html.escape(mostly)}</td></tr>"
        for phase, seconds, error, mostly in phase_rows(step)
    )
    head = '<tr><th>phase</th><th class="num">seconds</th><th>off by, of published rows</th><th>mostly</th></tr>'
    return f'<h2>Time of a step (modelled)</h2><div class="card">{time_svg(step)}<table>{head}{rows}</table></div>'


def _owners(plan: WholePlan) -> str:
    if not plan.stages:
        return ""
    return (
        "<h2>Who holds it</h2>"
        '<div class="charts">'
        f'<div class="card"><b>Device</b> <span class="muted small">each while it is there, not all at one time</span>'
        f"{owners_svg([(rank.coords.pp, rank.device_state) for rank in plan.stages])}</div>"
        f'<div class="card"><b>Host</b> <span class="muted small">of each rank</span>'
        f"{owners_svg([(rank.coords.pp, rank.host_state) for rank in plan.stages])}</div></div>"
    )


def _calls(plan: WholePlan) -> str:
    if not plan.stages:
        return ""
    counts: dict[str, int] = {}
    for rank in plan.stages:
        for calls in rank.calls:
            counts[calls.phase] = max(counts.get(calls.phase, 0), len(calls))
    links = ("node", "domain", "cluster")
    rows = "".join(
        f'<tr><td>{html.escape(phase)}</td><td class="num">{count:,}</td>'
        + "".join(f'<td class="num">{plan.traffic.get(phase, {}).get(link, 0) / 1e9:,.1f}</td>' for link in links)
        + "</tr>"
        for phase, count in counts.items()
    )
    head = "".join(f'<th class="num">{name}</th>' for name in ("calls", *(f"{link}, GB" for link in links)))
    return (
        '<h2>Calls to other ranks in a step</h2><div class="card"><div class="muted small">bytes that the busiest '
        "rank's calls hold, by the slowest link of their groups: within a node, within a domain of fast links, "
        "beyond</div>"
        f"<table><tr><th>phase</th>{head}</tr>{rows}</table></div>"
    )


def _facts() -> str:
    rows = "".join(f"<tr><td>{kind}</td><td>{html.escape(text)}</td></tr>" for kind, text in FACTS)
    return f'<h2>How sure it is</h2><div class="card"><table>{rows}</table></div>'

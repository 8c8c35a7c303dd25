"""A plan as tables on the console."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tools.plan.devices import GIB
from tools.plan.timing import StepTime, Variation
from tools.plan.timing.show import phase_rows, variation_rows
from tools.plan.whole import WholePlan


def print_plan(plan: WholePlan, step: StepTime | None, console: Console) -> None:
    """What fits and what does not, memory by stage and phase, calls, time."""
    run, config = plan.run, plan.run.config
    layout = plan.layout
    console.print(
        f"[bold]{run.name}[/bold]: {config.trainer.world_size} x {run.device.name}, training TP"
        f"{layout.tensor_model_parallel_size} PP{layout.pipeline_model_parallel_size} "
        f"CP{layout.context_parallel_size} DP{layout.data_parallel_size} EP{layout.expert_model_parallel_size} "
        f"ETP{layout.expert_tensor_parallel_size}, rollout "
        f"TP{config.actor_rollout_ref.rollout.tensor_model_parallel_size}"
    )
    console.print(
        f"Rows of {plan.size.prompt_length} + {plan.size.response_length} tokens; this rank's experts get "
        f"{plan.size.load:g} times the mean of the ranks that share them."
    )
    if plan.stages:
        console.print(f"Parameters, each counted once: {plan.num_parameters:,}")
        console.print(_state_table(plan))
        console.print(_phase_table(plan))
        console.print(_call_table(plan))
        console.print(
            f"Host memory of the fullest node: {plan.host_bytes / GIB:,.0f} of {run.device.host_memory_gib:,.0f} GiB"
        )
    if step is not None:
        console.print(_time_table(step))
    for warning in plan.warnings:
        console.print(f"[yellow]slow:[/yellow] {warning}", highlight=False)
    if plan.problems:
        for problem in plan.problems:
            console.print(f"[red]does not work:[/red] {problem}", highlight=False)
    elif plan.stages:
        worst = plan.worst
        console.print(
            f"[green]fits[/green]: the fullest device is rank {worst.rank}'s in {worst.peak.name}, "
            f"{plan.headroom_bytes / GIB:.1f} GiB of {plan.run.device.budget_bytes / GIB:.1f} stay free"
        )


def print_brief(plan: WholePlan, step: StepTime | None, console: Console) -> None:
    """Whether it fits, and how long a step takes, in a line; and every problem."""
    facts = []
    if plan.stages:
        facts.append(
            f"{plan.headroom_bytes / GIB:.1f} of {plan.run.device.budget_bytes / GIB:.1f} GiB stay free (rank "
            f"{plan.worst.rank} in {plan.worst.peak.name})"
        )
    if step is not None:
        facts.append(f"a step is predicted to take {step.total_s:.1f} s")
    verdict = "does not work" if plan.problems else "fits"
    console.print(
        f"plan: {verdict} on {plan.run.config.trainer.world_size} x {plan.run.device.name}; {'; '.join(facts)}",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
    for problem in plan.problems:
        console.print(f"- {problem}", highlight=False, markup=False, soft_wrap=True)


def print_variations(variations: list[Variation], console: Console) -> None:
    """A row for each variation of the run."""
    table = Table("with", "seconds", "change", "tokens/s/device", box=None, pad_edge=False, title="Sensitivity")
    for row in variation_rows(variations):
        table.add_row(*row)
    console.print(table)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f}"


def _state_table(plan: WholePlan) -> Table:
    owners = list(dict.fromkeys(owner for rank in plan.stages for owner in rank.device_state))
    hosts = list(dict.fromkeys(owner for rank in plan.stages for owner in rank.host_state))
    table = Table(box=None, pad_edge=False, title="State of a rank, GiB (exact), while it is there")
    table.add_column("where, what")
    for rank in plan.stages:
        table.add_column(f"stage {rank.coords.pp}", justify="right")
    for owner in owners:
        if any(rank.device_state.get(owner, 0) >= GIB // 1000 for rank in plan.stages):
            table.add_row(f"device {owner}", *(_gib(rank.device_state.get(owner, 0)) for rank in plan.stages))
    for owner in hosts:
        table.add_row(f"host {owner}", *(_gib(rank.host_state.get(owner, 0)) for rank in plan.stages))
    return table


def _phase_table(plan: WholePlan) -> Table:
    table = Table(box=None, pad_edge=False, title="Device memory by phase, GiB: the most, and what is left after it")
    table.add_column("phase")
    for rank in plan.stages:
        table.add_column(f"stage {rank.coords.pp}", justify="right")
    for place, phase in enumerate(plan.stages[0].phases):
        cells = (rank.phases[place] for rank in plan.stages)
        table.add_row(phase.name, *(f"{_gib(cell.peak_bytes)} {_gib(cell.after_bytes)}" for cell in cells))
    return table


def _call_table(plan: WholePlan) -> Table:
    table = Table(
        "phase",
        "calls",
        "node",
        "domain",
        "cluster",
        box=None,
        pad_edge=False,
        title="Calls to other ranks in a step (exact), and GB that the busiest rank's hold, by the slowest link",
    )
    counts = {calls.phase: 0 for rank in plan.stages for calls in rank.calls}
    for rank in plan.stages:
        for calls in rank.calls:
            counts[calls.phase] = max(counts[calls.phase], len(calls))
    for phase, by_link in plan.traffic.items():
        links = (f"{by_link.get(link, 0) / 1e9:,.1f}" for link in ("node", "domain", "cluster"))
        table.add_row(phase, f"{counts[phase]:,}", *links)
    return table


def _time_table(step: StepTime) -> Table:
    table = Table(
        "phase",
        "seconds",
        "off by, of published rows",
        "mostly",
        box=None,
        pad_edge=False,
        title="Time of a step (modelled)",
    )
    for row in phase_rows(step):
        table.add_row(*row)
    return table

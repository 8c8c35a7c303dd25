"""A plan on the console, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hf_formats.files import write_json
from tools.plan.devices import GIB
from tools.plan.tables import TextTable, call_table, launch_table, layout_text, phase_table, state_table, time_table
from tools.plan.timing.cost import StepTime
from tools.plan.whole import WholePlan


def print_plan(plan: WholePlan, step: StepTime, console: Console) -> None:
    """What fits and what does not, memory by stage and phase, calls, time."""
    run, config = plan.run, plan.run.config
    console.print(
        f"[bold]{run.name}[/bold]: {config.num_devices} x {run.device.name}, training "
        f"{layout_text(plan.layout)}, rollout TP{config.actor_rollout_ref.rollout.tensor_model_parallel_size}"
    )
    console.print(
        f"Rows of {plan.size.prompt_length} + {plan.size.response_length} tokens; this rank's experts get "
        f"{plan.size.load:g} times the mean of the ranks that share them."
    )
    if plan.stages:
        console.print(f"Parameters, each counted once: {plan.num_parameters:,}")
        for table in (state_table, phase_table, call_table):
            print_table(table(plan), console)
        if plan.worst.launches:
            print_table(launch_table(plan, step), console)
        console.print(
            f"Host memory of the fullest node: {plan.host_bytes / GIB:,.0f} of {run.device.host_memory_gib:,.0f} GiB"
        )
    reason = config.actor_rollout_ref.actor.skip_sharing_reason(config.trainer.device)
    sharing = f"do not share it ({reason})" if reason else "share it"
    console.print(
        f"The update has {step.updated_tokens:,.0f} of {step.tokens:,.0f} tokens: samples of a prompt {sharing}."
    )
    if step.speculation:
        print_plain(console, step.speculation)
    print_table(time_table(step), console)
    for warning in plan.warnings:
        console.print(f"[yellow]slow:[/yellow] {warning}", highlight=False)
    for problem in plan.problems:
        console.print(f"[red]does not work:[/red] {problem}", highlight=False)
    if not plan.problems and plan.stages:
        console.print(
            f"[green]fits[/green]: the fullest device is rank {plan.worst.rank}'s in {plan.worst.peak.name}, "
            f"{plan.headroom_bytes / GIB:.1f} GiB of {run.device.budget_bytes / GIB:.1f} stay free"
        )


def print_brief(plan: WholePlan, step: StepTime, console: Console) -> None:
    """Whether it fits, and how long a step takes, in a line; and every problem."""
    facts = [f"a step is predicted to take {step.total_s:.1f} s"]
    if plan.stages:
        free = f"{plan.headroom_bytes / GIB:.1f} of {plan.run.device.budget_bytes / GIB:.1f} GiB stay free"
        facts.insert(0, f"{free} (rank {plan.worst.rank} in {plan.worst.peak.name})")
    verdict = "does not work" if plan.problems else "fits"
    devices = f"{plan.run.config.num_devices} x {plan.run.device.name}"
    print_plain(console, f"plan: {verdict} on {devices}; {'; '.join(facts)}")
    for problem in plan.problems:
        print_plain(console, f"- {problem}")


def print_table(table: TextTable, console: Console) -> None:
    """The table without lines."""
    shown = Table(box=None, pad_edge=False, title=table.title)
    for index, name in enumerate(table.columns):
        shown.add_column(name, justify="right" if table.is_number(index) else "left")
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown)


def print_plain(console: Console, text: str) -> None:
    """The text as it is: without colours, markup and line breaks."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def write_plan(plan: WholePlan, step: StepTime, path: Path) -> None:
    """Writes bytes and seconds, and of the calls only numbers; the file is written whole or not at all."""
    run = plan.run
    stages = [
        {
            "rank": rank.rank,
            "stage": rank.name if rank.coords is None else rank.coords.pp,
            "num_parameters": rank.num_parameters,
            "device_state": rank.device_state,
            "host_state": rank.host_state,
            "phases": [asdict(phase) for phase in rank.phases],
            "calls": {calls.phase: calls.count for calls in rank.calls},
            "weight_sync": rank.sync_bytes,
            "launches": [asdict(launches) for launches in rank.launches],
        }
        for rank in plan.stages
    ]
    values = {
        "name": run.name,
        "device": asdict(run.device),
        "num_devices": run.config.num_devices,
        "num_parameters": plan.num_parameters,
        "rows": asdict(plan.size),
        "problems": list(plan.problems),
        "warnings": plan.warnings,
        "host_bytes_of_fullest_node": plan.host_bytes if plan.stages else None,
        "stages": stages,
        "traffic": plan.traffic,
        "step": {
            "seconds": step.seconds,
            "total_s": step.total_s,
            "terms": step.terms,
            "tokens_per_s_device": step.tokens_per_s_device,
            **({"speculation": step.speculation} if step.speculation else {}),
        },
    }
    write_json(path, values)

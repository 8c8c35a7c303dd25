"""The closing summary of a run on the console: the scores that were reached and the files."""

from __future__ import annotations

import re

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tools.report.learning import verdict
from tools.report.page import duration
from tools.report.run_data import RunData

PHASES = ("gen", "old_log_prob", "ref", "reward", "adv", "update_actor")
FILES = (
    ("report.html", "the run on one page"),
    ("rewards.png", "reward curve"),
    ("val_score.png", "validation curve"),
    ("response_len.png", "response lengths"),
    ("metrics.jsonl", "every metric of every step"),
    ("restarts.jsonl", "when workers died, and why"),
    ("changes.jsonl", "what a resumed run learned from instead"),
    ("tensorboard", "the same for TensorBoard"),
    ("checkpoints", "training checkpoints"),
    ("export_hf", "the trained model as Hugging Face safetensors"),
    ("samples", "recorded samples, for python -m tools.viewer"),
    ("rollouts", "whole batches, for trainer.train_only"),
    ("timeline", "recorded steps, for ui.perfetto.dev"),
    ("profile", "profiles of steps, op by op, for ui.perfetto.dev"),
    ("logs/latest", "the output of every stage, driver, rank and Ray"),
)


def _phases(run: RunData) -> str:
    """Seconds of the last step that has them and of its phases, in the order they happen."""
    step, seconds = run.series("timing_s/step")[-1]
    found = {name: dict(run.series(f"timing_s/{name}")).get(step) for name in PHASES}
    parts = ", ".join(f"{name} {value:.2f}" for name, value in found.items() if value is not None)
    return f"{seconds:.2f} s: {parts}"


def _memory(run: RunData) -> Table | None:
    """The most memory of any rank in each phase of the run, GB; None where nothing was measured."""
    phases = {name.split("/")[1] for step in run.metrics for name in step if name.startswith("memory/")}
    kinds = ("allocated", "reserved", "host")
    most = {(phase, kind): _most(run, f"memory/{phase}/{kind}_gb") for phase in phases for kind in kinds}
    shown = [kind for kind in kinds if any(most[phase, kind] is not None for phase in phases)]
    if not shown:
        return None
    table = Table("GB", *shown, "rank", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for phase in sorted(phases, key=lambda phase: -(most[phase, shown[0]] or (0.0, 0))[0]):
        cells = [most[phase, kind] for kind in shown]
        rank = None if cells[0] is None else dict(run.series(f"memory/{phase}/rank")).get(cells[0][1])
        texts = ["" if cell is None else f"{cell[0]:.2f}" for cell in cells]
        table.add_row(phase, *texts, "" if rank is None else f"{rank:.0f}")
    return table


def _most(run: RunData, name: str) -> tuple[float, int] | None:
    """The largest value of a metric and its step."""
    return max(((value, step) for step, value in run.series(name)), default=None)


def closing_summary(run: RunData) -> RenderableType:
    """A panel with the scores and the files that exist."""
    facts = Table.grid(padding=(0, 2))
    scores = run.series("val/score")
    if len(scores) > 1:
        (first_step, first), (last_step, last) = scores[0], scores[-1]
        facts.add_row("validation score", f"{first:.3f} (step {first_step}) -> {last:.3f} (step {last_step})")
        facts.add_row("last validations", ", ".join(f"{value:.3f}" for _, value in scores[-3:]))
    names = {name for step in run.metrics for name in step}
    for name in sorted(match[1] for name in names if (match := re.fullmatch("val/(.+)/score", name))):
        values = [value for _, value in run.series(f"val/{name}/score")]
        facts.add_row(Text(f"validation, {name}"), f"{values[0]:.3f} -> {values[-1]:.3f}")
    facts.add_row("learning", Text(verdict(run)))
    if score := run.series("critic/score/mean"):
        facts.add_row("training score", f"{score[0][1]:.3f} -> {score[-1][1]:.3f}")
    facts.add_row("steps", f"{int(run.metrics[-1]['step'])} in {duration(run.seconds())}")
    if throughput := run.series("perf/throughput"):
        facts.add_row("throughput", f"{throughput[-1][1]:,.1f} tokens per second and device in the last step")
    if run.series("timing_s/step"):
        facts.add_row("last step", _phases(run))
    if gaps := [value for _, value in run.series("training/rollout_probs_diff_max")]:
        facts.add_row("trainer/rollout gap", f"at most {max(gaps):.1e} (probabilities of the sampled tokens)")
    if run.restarts:
        steps = ", ".join(str(restart["step"]) for restart in run.restarts)
        facts.add_row("restarts of workers", f"{len(run.restarts)}, in steps {steps}")
    for change in run.changes:
        keys = ", ".join(entry["key"] for entry in change["changes"])
        facts.add_row("resumed with another", Text(f"{keys}, from step {change['step']} on"))
    if memory := _memory(run):
        facts.add_row("memory of a phase", memory)
    files = Table.grid(padding=(0, 2))
    for name, meaning in FILES:
        if (run.run_dir / name).exists():
            files.add_row(name, Text(meaning, style="dim"))
    return Panel(Group(facts, Text(f"\n{run.run_dir}"), files), title="Result", expand=False)

"""``--why-not``: every problem of another layout, else the ranks and phases that are too full, else what it costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rich.console import Console

from tools.plan.devices import GIB
from tools.plan.rank_plan import RankPlan
from tools.plan.search.bound import Bounds
from tools.plan.search.layouts import rollout_settings
from tools.plan.search.rank import ranking
from tools.plan.search.show import describe, differences
from tools.plan.search.verify import TRAINING
from tools.plan.setup import PlannedRun
from tools.plan.timing.constants import Constants
from tools.plan.timing.cost import predict
from tools.plan.timing.run_shape import RunShape
from tools.plan.training import StepSize
from tools.plan.whole import WholePlan, layout_problems, plan_run
from verl.trainer.config import validate_config


def explain(
    own: PlannedRun, overrides: Sequence[str], shape: RunShape, size: StepSize, constants: Constants, console: Console
) -> bool:
    """Prints what stops ``own`` with ``overrides``, or how much slower than the best it is; whether it fits.

    ``shape`` is that of the unchanged run, whose lengths the changed one gets.
    """
    try:
        run = own.changed(overrides)
    except ValueError as error:
        _print(console, "It is not a config that can run:", [str(error)])
        return False
    problems = list(dict.fromkeys([*validate_config(run.config), *layout_problems(run)]))
    try:
        shape = RunShape.of(run.config, run.hf, shape.lengths, run.name)
    except ValueError as error:
        lines = [line.removeprefix("  - ") for line in str(error).splitlines()[1:]] or [str(error)]
        problems += [line for line in lines if not any(line in problem for problem in problems)]
    if problems:
        _print(console, "It cannot run:", problems)
        return False
    plan = plan_run(run, size)
    full = [line for rank in plan.stages for line in _too_full(rank, run.device.budget_bytes)]
    other = [problem for problem in plan.problems if not full or " needs " not in problem]
    gives = what_gives(plan, shape) if plan.problems and plan.stages else []
    _print(console, "It cannot run:", other)
    _print(console, "It does not fit:", full)
    _print(console, "What would make room, one at a time:", gives)
    if full and not gives:
        changes = "micro-batches, recomputation or rollout steps"
        console.print(f"No single change of {changes} makes room: another layout, or more nodes")
    if not plan.problems:
        _compare(run, shape, size, constants, console)
    return not plan.problems


def what_gives(plan: WholePlan, shape: RunShape) -> list[str]:
    """Single changes after which the bound says that it fits in the phases that are too full now."""
    run, bounds = plan.run, Bounds(plan.run, plan.size)
    budget = run.device.budget_bytes
    full = {rank.peak.name in TRAINING for rank in plan.stages if rank.peak.peak_bytes > budget}
    changes: list[tuple[str, RunShape]] = []
    if True in full:
        update, log_prob = shape.train.update, shape.train.log_prob
        if shape.train.recomputed_layers >= 0:
            changes.append(("recomputing all layers", shape.with_train(recomputed_layers=-1)))
        if update.samples > 1:
            changes.append(("micro-batches of 1", shape.with_train(update=replace(update, samples=1))))
        if log_prob.samples > 1:
            one = replace(log_prob, samples=1)
            changes.append(("log-prob micro-batches of 1", shape.with_train(log_prob=one)))
    if False in full:
        for other in rollout_settings(run, shape.rollout)[1:]:
            text = f"expert_exchange={other.expert_exchange} max_num_batched_tokens={other.max_num_batched_tokens}"
            changes.append((f"rollout.{text}", replace(shape, rollout=other)))
    phases = [name for is_training in full for name in (("log_prob", "update") if is_training else ("generate",))]
    fitting = []
    for text, changed in changes:
        found = bounds.memory(changed)
        most = max(found[name] for name in phases)
        if most <= budget:
            fitting.append(f"{text}: the bound is then {most / GIB:.1f} GiB")
    return fitting[:4]


def _compare(run: PlannedRun, shape: RunShape, size: StepSize, constants: Constants, console: Console) -> None:
    step = predict(shape, run.device, constants)
    best = next(iter(ranking(run, shape, size, constants, count=1).best), None)
    fits = f"It fits, {step.total_s:,.1f} s a step"
    if best is None or best.step.total_s >= step.total_s:
        console.print(f"{fits}: nothing that the search knows is faster", highlight=False, markup=False)
        return
    slower = step.total_s / best.step.total_s - 1
    text = f"{fits}: {slower:.0%} slower than the fastest that fits by the bound ({best.step.total_s:,.1f} s: "
    console.print(f"{text}{describe(best)})", highlight=False, markup=False)
    for line in differences(best.step, step, "the best"):
        console.print(f"  {line}", highlight=False, markup=False)


def _print(console: Console, title: str, lines: Iterable[str]) -> None:
    """A title and its lines; nothing without lines."""
    for index, line in enumerate(lines):
        if index == 0:
            console.print(f"[bold]{title}[/bold]", highlight=False)
        console.print(f"  {line}", highlight=False, markup=False)


def _too_full(rank: RankPlan, budget: int) -> list[str]:
    """Every phase beyond the budget, with the state that stays in memory."""
    found = []
    for phase in rank.phases:
        over = phase.peak_bytes - budget
        if over > 0:
            wanted = ("parameter", "gradient", "master", "exp_avg") if phase.name in TRAINING else ("rollout",)
            parts = (
                f"{owner} {num_bytes / GIB:.1f}"
                for owner, num_bytes in rank.device_state.items()
                if owner.startswith(wanted) and num_bytes > GIB // 20
            )
            found.append(
                f"{rank.name} in {phase.name}: {phase.peak_bytes / GIB:.1f} GiB, {over / GIB:.1f} too much "
                f"({', '.join(parts)}; {(phase.peak_bytes - phase.before_bytes) / GIB:.1f} come in the phase)"
            )
    return found

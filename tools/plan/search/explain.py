"""Why not another layout: every problem of it, else the ranks and phases that are too full, else what it costs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.console import Console

from tools.plan.devices import GIB
from tools.plan.rank_plan import RankPlan, StepSize
from tools.plan.search.bound import Bounds, RolloutKnobs
from tools.plan.search.layouts import rollout_settings
from tools.plan.search.rank import Candidate, memory, ranking
from tools.plan.search.show import describe, differences
from tools.plan.search.verify import TRAINING
from tools.plan.setup import PlannedRun
from tools.plan.timing import Constants, RunShape, StepTime, predict
from tools.plan.whole import WholePlan, layout_problems, plan_run
from verl.trainer.config import validate_config


@dataclass(frozen=True)
class Answer:
    """problems: those of the config and the layout · full: ranks that are too full · gives: changes that make room ·
    step, best: predictions for this layout and the fastest one, if any · slower: phases that differ between the two.
    """

    problems: tuple[str, ...]
    full: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    step: StepTime | None = None
    best: Candidate | None = None
    slower: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether nothing stops it."""
        return not self.problems and not self.full


def explained(run: PlannedRun, own: RunShape, size: StepSize, constants: Constants) -> Answer:
    """The answer for ``run``, the changed config; ``own`` is the shape of the unchanged one, whose lengths it gets."""
    layout = run.config.training_layout
    problems = list(dict.fromkeys([*validate_config(run.config), *layout_problems(layout, run)]))
    try:
        shape = RunShape.of(run.config, run.hf, own.lengths, run.name)
    except ValueError as error:
        return Answer((*problems, *_lines(error, problems)))
    if problems:
        return Answer(tuple(problems))
    plan = plan_run(run, size)
    if not plan.stages:
        return Answer(plan.problems)
    step = predict(shape, run.device, constants)
    full = tuple(_too_full(plan))
    other = tuple(problem for problem in plan.problems if " needs " not in problem)
    if full or other:
        return Answer(other, full, tuple(what_gives(run, shape, plan)), step)
    best = next(iter(ranking(run, shape, size, constants, count=1).best), None)
    slower = differences(best.step, step, "the best") if best is not None else []
    return Answer((), (), (), step, best, tuple(slower))


def what_gives(run: PlannedRun, shape: RunShape, plan: WholePlan) -> list[str]:
    """Single changes after which the bound says that it fits in the phases that are too full now."""
    bounds, knobs = Bounds(run.config, run.hf, run.device, plan.size), RolloutKnobs.of(run.config)
    full = {_part(rank.peak.name) for rank in plan.stages if rank.peak.peak_bytes > plan.run.device.budget_bytes}
    changes: list[tuple[str, RunShape, RolloutKnobs]] = []
    if "training" in full:
        train, cut = shape.train, shape.train.update
        if train.recomputed_layers >= 0:
            changes.append(("recomputing all layers", _train(shape, recomputed_layers=-1), knobs))
        if cut.samples > 1:
            changes.append(("micro-batches of 1", _train(shape, update=replace(cut, samples=1)), knobs))
        if shape.train.log_prob.samples > 1:
            one = replace(shape.train.log_prob, samples=1)
            changes.append(("log-prob micro-batches of 1", _train(shape, log_prob=one), knobs))
    if "rollout" in full:
        for other in rollout_settings(run.config, run.hf, run.device, shape.rollout)[1:]:
            text = f"expert_exchange={other.expert_exchange} max_num_batched_tokens={other.max_num_batched_tokens}"
            changes.append((f"rollout.{text}", shape, other))
    fitting = []
    for text, changed, settings in changes:
        found = memory(bounds, changed, settings)
        relevant = [found[name] for part in full for name in _PHASES[part]]
        if max(relevant, default=0.0) <= bounds.device.budget_bytes:
            fitting.append(f"{text}: the bound is then {max(relevant) / GIB:.1f} GiB")
    return fitting[:4]


_PHASES = {"training": ("log_prob", "update"), "rollout": ("generate",)}


def print_answer(answer: Answer, console: Console) -> None:
    """Print what stops the layout, or what makes it slower than the best."""

    def show(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    for title, lines in (
        ("It cannot run:", answer.problems),
        ("It does not fit:", answer.full),
        ("What would make room, one at a time:", answer.gives),
    ):
        if lines:
            console.print(f"[bold]{title}[/bold]")
            for line in lines:
                show(f"  {line}")
    if answer.full and not answer.gives:
        show(
            "No single change of micro-batches, recomputation or rollout steps makes room: another layout, or more "
            "nodes"
        )
    if not answer.fits or answer.step is None:
        return
    total = answer.step.total_s
    if answer.best is None or answer.best.step.total_s >= total:
        show(f"It fits, {total:,.1f} s a step: nothing that the search knows is faster")
        return
    slower = total / answer.best.step.total_s - 1
    show(
        f"It fits, {total:,.1f} s a step: {slower:.0%} slower than the fastest that fits by the bound "
        f"({answer.best.step.total_s:,.1f} s: {describe(answer.best)})"
    )
    for line in answer.slower:
        show(f"  {line}")


def _too_full(plan: WholePlan) -> list[str]:
    """Every stage and phase beyond the budget, with the state that stays in memory."""
    found = []
    for rank in plan.stages:
        for phase in rank.phases:
            over = phase.peak_bytes - plan.run.device.budget_bytes
            if over > 0:
                come = phase.peak_bytes - phase.before_bytes
                found.append(
                    f"stage {rank.coords.pp} in {phase.name}: {phase.peak_bytes / GIB:.1f} GiB, {over / GIB:.1f} too "
                    f"much ({_parts(rank, phase.name)}; {come / GIB:.1f} come in the phase)"
                )
    return found


def _parts(rank: RankPlan, phase: str) -> str:
    wanted = ("parameter", "gradient", "master", "exp_avg", "exp_avg_sq") if phase in TRAINING else ()
    state = {
        owner: num_bytes
        for owner, num_bytes in rank.device_state.items()
        if owner in wanted or (not wanted and owner.startswith("rollout"))
    }
    return ", ".join(f"{owner} {num_bytes / GIB:.1f}" for owner, num_bytes in state.items() if num_bytes > GIB // 20)


def _part(phase: str) -> str:
    return "training" if phase in TRAINING else "rollout"


def _train(shape: RunShape, **changed: object) -> RunShape:
    return replace(shape, train=replace(shape.train, **changed))  # type: ignore[arg-type]


def _lines(error: ValueError, known: list[str]) -> list[str]:
    lines = [line.removeprefix("  - ") for line in str(error).splitlines()[1:]] or [str(error)]
    return [line for line in lines if not any(line in problem for problem in known)]

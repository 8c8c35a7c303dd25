"""The fastest layouts planned rank by rank, until so many are found that fit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from tools.plan.matching import problems as call_problems
from tools.plan.search.overrides import overrides_of
from tools.plan.search.rank import Candidate
from tools.plan.setup import PlannedRun
from tools.plan.training import OLD, REF, UPDATE, StepSize
from tools.plan.whole import WholePlan, calls_between_stages, plan_run
from verl.trainer.config import validate_config

TRIES_FOR_EACH = 4
TRAINING = (OLD, REF, UPDATE)
GENERATION = ("prefill", "decode", "generate_end")


@dataclass(frozen=True)
class Verified:
    """A candidate with the plan of its ranks; ``problems`` say why it does not work after all."""

    candidate: Candidate
    overrides: tuple[str, ...]
    plan: WholePlan | None
    problems: tuple[str, ...]


def verified(
    run: PlannedRun,
    candidates: Sequence[Candidate],
    size: StepSize,
    count: int,
    report: Callable[[Verified], None] = lambda found: None,
    kept: Collection[str] = (),
) -> list[Verified]:
    """The first ``count`` of ``candidates`` whose plans fit, and those that do not; ``report`` is called with each.

    A half (training, rollout) in which one did not fit is not tried again. Ends after four tries for each one wanted.
    ``kept`` are keys that keep the run's own values.
    """
    tried: list[Verified] = []
    bad_halves: set[object] = set()
    for candidate in candidates:
        if sum(not found.problems for found in tried) == count or len(tried) == TRIES_FOR_EACH * count:
            break
        halves = (candidate.shape.train, candidate.shape.rollout)
        if bad_halves & set(halves):
            continue
        found = _planned(run, candidate, size, kept)
        tried.append(found)
        report(found)
        if found.problems and found.plan is not None and found.plan.stages:
            at_fault = halves_at_fault(found.plan)
            bad_halves |= {half for half, is_bad in zip(halves, at_fault, strict=True) if is_bad}
    return tried


def halves_at_fault(plan: WholePlan) -> tuple[bool, bool]:
    """Whether the (training, rollout) half of ``plan`` would not work with another one either; neither when only the
    two together do not, as where both models lie on the device for the weight sync.
    """
    device = plan.run.device
    full = {phase.name for rank in plan.stages for phase in rank.phases if phase.peak_bytes > device.budget_bytes}
    training, rollout = bool(full & set(TRAINING)), bool(full & {"prefill", "decode", "wake_kv_cache"})
    if not plan.is_whole:
        return training, rollout
    calls = calls_between_stages(plan.layout, plan.stages)

    def has_problems(names: Sequence[str]) -> bool:
        return bool(call_problems({rank: [p for p in phases if p.name in names] for rank, phases in calls.items()}))

    training = training or plan.host_bytes > device.host_memory_bytes or has_problems(TRAINING)
    return training, rollout or has_problems(GENERATION)


def _planned(run: PlannedRun, candidate: Candidate, size: StepSize, kept: Collection[str]) -> Verified:
    overrides = tuple(text for text in overrides_of(candidate, run.config) if text.partition("=")[0] not in kept)
    try:
        changed = run.changed(overrides)
    except ValueError as error:
        return Verified(candidate, overrides, None, (str(error),))
    if problems := validate_config(changed.config):
        return Verified(candidate, overrides, None, tuple(problems))
    plan = plan_run(changed, size, ends_when_full=True)
    return Verified(candidate, overrides, plan, plan.problems)

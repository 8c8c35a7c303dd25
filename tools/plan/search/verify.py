"""The fastest layouts planned rank by rank, until so many are found that fit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.plan.rank_plan import StepSize
from tools.plan.search.overrides import overrides_of
from tools.plan.search.rank import Candidate
from tools.plan.setup import PlannedRun, planned_run
from tools.plan.training import OLD, REF, UPDATE
from tools.plan.whole import WholePlan, plan_run
from verl.trainer.config import validate_config

TRIES_FOR_EACH = 4


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line: see ``planned_run``."""

    name: str
    overrides: tuple[str, ...]
    nodes: int | None
    model: str | None

    def run(self, own: PlannedRun, more: Sequence[str], scratch: Path) -> PlannedRun:
        """With ``more`` overrides; ValueError as ``planned_run``."""
        given = [*self.overrides, *more]
        return planned_run(self.name, given, own.device, nodes=self.nodes, model=self.model, scratch=scratch)


@dataclass(frozen=True)
class Verified:
    """A candidate with the plan of its ranks; ``problems`` say why it does not work after all."""

    candidate: Candidate
    overrides: tuple[str, ...]
    plan: WholePlan | None
    problems: tuple[str, ...]


def verified(
    request: Request,
    own: PlannedRun,
    candidates: Sequence[Candidate],
    size: StepSize,
    count: int,
    tell: Callable[[Verified], None] = lambda found: None,
) -> list[Verified]:
    """The first ``count`` of ``candidates`` whose plans fit, and those tried in vain; ``tell`` hears of each.

    A half (training, rollout) in which one did not fit is not tried again. Ends after four tries for each one wanted.
    """
    tried: list[Verified] = []
    bad_halves: set[object] = set()
    good = 0
    for candidate in candidates:
        if good == count or len(tried) == TRIES_FOR_EACH * count:
            break
        halves = (candidate.train, (candidate.rollout, candidate.knobs))
        if any(half in bad_halves for half in halves):
            continue
        found = plan_candidate(request, own, candidate, size)
        tried.append(found)
        tell(found)
        good += not found.problems
        if found.problems and found.plan is not None and found.plan.stages:
            is_training = found.plan.worst.peak.name in (OLD, REF, UPDATE)
            bad_halves.add(halves[0] if is_training else halves[1])
    return tried


def plan_candidate(request: Request, own: PlannedRun, candidate: Candidate, size: StepSize) -> Verified:
    """The plan of a candidate's ranks."""
    overrides = overrides_of(candidate, own.config)
    with tempfile.TemporaryDirectory(prefix="plan-") as scratch:
        try:
            run = request.run(own, overrides, Path(scratch))
        except ValueError as error:
            return Verified(candidate, tuple(overrides), None, (str(error),))
        problems = validate_config(run.config)
        plan = None if problems else plan_run(run, size)
    return Verified(candidate, tuple(overrides), plan, tuple(problems) or (plan.problems if plan else ()))

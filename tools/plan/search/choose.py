"""``--choose``: one layout for the devices that are there, with what moves to host memory and the rollout's share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.plan.devices import GIB
from tools.plan.search.overrides import ENGINE, MODELS, ROLLOUT, overrides_of
from tools.plan.search.rank import Candidate, Ranking, ranking
from tools.plan.search.show import describe
from tools.plan.search.verify import verified
from tools.plan.setup import PlannedRun
from tools.plan.timing import Constants, RunShape
from tools.plan.timing.run_shape import Lengths
from tools.plan.training import StepSize

_WEIGHTS = (f"{ENGINE}.param_offload=true", f"{ENGINE}.grad_offload=true")
_STATE = f"{ENGINE}.optimizer_offload=true"
_ON_HOST = f"{MODELS}.actor.optim.override_optimizer_config.optimizer_cpu_offload=true"
MEMORY = {
    "nothing moves to host memory": (),
    "the optimizer's state moves to host memory for the rollout": (_STATE,),
    "weights, gradients and the optimizer's state move to host memory for the rollout": (*_WEIGHTS, _STATE),
    "weights and gradients move to host memory for the rollout, the optimizer works there": (*_WEIGHTS, _ON_HOST),
}
SHARE = f"{ROLLOUT}.gpu_memory_utilization"
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)  # the largest that fits: its cache holds the most sequences
TRIED = 200  # candidates of each form of memory
# A key of these that the user gives leaves out every other layout; of the other keys the user's value is taken.
LAYOUT_KEYS = (
    *(f"{ENGINE}.{axis}_model_parallel_size" for axis in ("tensor", "pipeline", "expert")),
    f"{ENGINE}.context_parallel_size",
    f"{ENGINE}.expert_tensor_parallel_size",
    f"{ROLLOUT}.tensor_model_parallel_size",
)


@dataclass(frozen=True)
class Choice:
    """overrides: that make the config the chosen layout; none where nothing fits · reasons: a sentence each."""

    overrides: tuple[str, ...]
    reasons: tuple[str, ...]

    def write(self, path: Path) -> None:
        content = {"overrides": self.overrides, "reasons": self.reasons}
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class _Form:
    """Layouts with one form of memory, fastest first."""

    name: str
    overrides: tuple[str, ...]
    run: PlannedRun
    found: Ranking
    best: tuple[Candidate, ...]


def choose(run: PlannedRun, lengths: Lengths, size: StepSize, constants: Constants) -> Choice:
    """The layout with the shortest predicted step whose plan fits, over everything that may move to host memory."""
    forms = sorted(_forms(run, lengths, size, constants), key=lambda form: form.best[0].step.total_s)
    if not forms:
        return Choice(
            (), ("no layout of these devices fits by the bound: shorter rows, more devices or a smaller model",)
        )
    most = max(form.found.num_fitting for form in forms)
    reasons = [f"{forms[0].found.num_training:,} training layouts divide, up to {most:,} of them fit by the bound"]
    for form in forms:
        for found in verified(form.run, form.best, size, 1):
            seconds = f"a step is predicted to take {found.candidate.step.total_s:,.1f} s"
            if found.problems or found.plan is None:
                reasons.append(f"not {describe(found.candidate)}: {found.problems[0]}")
                continue
            free, peak = found.plan.headroom_bytes / GIB, found.plan.worst.peak.name
            reasons.append(f"{describe(found.candidate)}: {seconds}; {free:.1f} GiB stay free, fullest in {peak}")
            reasons.append(f"{form.name}; the rollout gets {form.overrides[-1].partition('=')[2]} of the device")
            reasons += [
                f"slower or fuller: {other.name}, {other.best[0].step.total_s:,.1f} s"
                for other in forms
                if other != form
            ]
            return Choice((*form.overrides, *_without(found.overrides, _given(run))), tuple(reasons))
    return Choice((), (*reasons, "no layout of these devices fits"))


def _forms(run: PlannedRun, lengths: Lengths, size: StepSize, constants: Constants) -> Iterator[_Form]:
    """The forms of memory that the user leaves open and that have a layout; host memory is a CPU's own."""
    given = _given(run)
    is_given = any(text.partition("=")[0] in given for texts in MEMORY.values() for text in texts)
    forms = {"what moves to host memory is given": ()} if is_given else MEMORY
    if run.device.family == "cpu" and not is_given:
        forms = dict(list(MEMORY.items())[:1])
    for name, moved in forms.items():
        for share in [float(given[SHARE])] if SHARE in given else SHARES:
            overrides = (*moved, f"{SHARE}={share}")
            changed = run.changed(overrides)
            shape = RunShape.of(changed.config, changed.hf, lengths, changed.name)
            found = ranking(changed, shape, size, constants, TRIED)
            best = tuple(candidate for candidate in found.best if _agrees(candidate, changed, given))
            if best:
                yield _Form(name, overrides, changed, found, best)
                break


def _given(run: PlannedRun) -> dict[str, str]:
    """key -> value of the run's own overrides."""
    pairs = (text.lstrip("+").partition("=") for text in run.arguments["overrides"])
    return {key: value for key, _, value in pairs}


def _agrees(candidate: Candidate, run: PlannedRun, given: dict[str, str]) -> bool:
    chosen = dict(text.split("=", 1) for text in overrides_of(candidate, run.config))
    return all(given.get(key, chosen[key]) == chosen[key] for key in LAYOUT_KEYS)


def _without(overrides: tuple[str, ...], given: dict[str, str]) -> tuple[str, ...]:
    return tuple(text for text in overrides if text.partition("=")[0] not in given)

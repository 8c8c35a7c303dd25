"""``--choose``: one layout for the devices that are there, with what moves to host memory and the rollout's share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hf_formats.files import write_json
from megatron.core.parallel_layout import ParallelLayout
from tools.plan.devices import GIB
from tools.plan.search.overrides import ENGINE, MODELS, ROLLOUT, value_text
from tools.plan.search.rank import Ranking, ranking
from tools.plan.search.show import batch, describe, recomputed
from tools.plan.search.verify import verified
from tools.plan.setup import PlannedRun
from tools.plan.timing.constants import Constants
from tools.plan.timing.drafts import acceptance_note
from tools.plan.timing.run_shape import Lengths, RolloutShape, RunShape
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
LEAST_GAIN = 0.02  # by so much a step must be shorter for more to move to host memory
KEPT_FREE = 0.05  # of the device: the plan knows no fragmentation, and no workspaces of vendors' kernels
ADVICE = "shorter rows, more devices or a smaller model"
# Sizes of the training layout; one that the user gives leaves out every other layout, as the rollout's do.
TRAINING_AXES = (
    *(f"{axis}_model_parallel_size" for axis in ("tensor", "pipeline", "expert")),
    "context_parallel_size",
    "expert_tensor_parallel_size",
)
PLAIN = (
    *(f"{ENGINE}.{axis}=1" for axis in TRAINING_AXES),
    *(f"{ROLLOUT}.{axis}_parallel_size=1" for axis in ("tensor_model", "data")),
    f"{ROLLOUT}.enable_expert_parallel=false",
)


@dataclass(frozen=True)
class Choice:
    """overrides: that make the config the chosen layout; none where nothing fits · reasons: a sentence each."""

    overrides: tuple[str, ...]
    reasons: tuple[str, ...]

    def write(self, path: Path) -> None:
        """Write the choice as JSON."""
        write_json(path, asdict(self))


@dataclass(frozen=True)
class _Form:
    """Layouts with one form of memory, fastest first."""

    name: str
    overrides: tuple[str, ...]
    run: PlannedRun
    found: Ranking

    @property
    def seconds(self) -> float:
        """The predicted step of its fastest layout."""
        return self.found.best[0].step.total_s


def choose(run: PlannedRun, lengths: Lengths, size: StepSize, constants: Constants) -> Choice:
    """The layout with the shortest predicted step whose plan fits, over everything that may move to host memory.

    Of forms of memory that take about as long, the one that moves least comes first.
    A part of the device stays free; what the run's own overrides give is kept.
    """
    given, memory_gib = _given(run), run.device.memory_gib
    run = replace(run, device=replace(run.device, memory_gib=memory_gib * (1 - KEPT_FREE)))
    forms = list(_forms(run, lengths, size, constants))
    if not forms:
        return Choice((), (f"no layout of these devices fits by the bound: {ADVICE}",))
    fast = min(form.seconds for form in forms) * (1 + LEAST_GAIN)
    forms.sort(key=lambda form: 0.0 if form.seconds <= fast else form.seconds)
    most = max(form.found.num_fitting for form in forms)
    divide = f"{forms[0].found.num_training:,} training layout(s) divide"
    note = acceptance_note(run.config.actor_rollout_ref.rollout.draft_method, lengths.acceptance)
    reasons = [note] if note else []
    reasons += [f"{divide}, up to {most:,} of them fit by the bound with {KEPT_FREE:.0%} of a device kept free"]
    for form in forms:
        for found in verified(form.run, form.found.best, size, 1, kept=given):
            if found.problems or found.plan is None:
                reasons.append(f"not {describe(found.candidate)}: {found.problems[0]}")
                continue
            step, train = found.candidate.step, found.candidate.shape.train
            free, peak = found.plan.headroom_bytes / GIB + memory_gib * KEPT_FREE, found.plan.worst.peak.name
            reasons += [
                f"{describe(found.candidate)}: a step is predicted to take {step.total_s:,.1f} s; {free:.1f} GiB stay "
                f"free, fullest in {peak}",
                f"an update's micro-batch: {batch(train.update)}; layers computed again: {recomputed(train)}",
                f"{form.name}; the rollout gets {form.overrides[-1].partition('=')[2]} of the device",
                *(f"slower or fuller: {other.name}, {other.seconds:,.1f} s" for other in forms if other != form),
            ]
            return Choice(form.overrides + found.overrides, tuple(reasons))
    return Choice((), (*reasons, f"no layout of these devices fits: {ADVICE}"))


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
            plain = changed.changed(PLAIN)  # some of a layout's sizes that are given make none by themselves
            shape = RunShape.of(plain.config, plain.hf, lengths, plain.name)
            found = ranking(plain, shape, size, constants, TRIED, lambda layout: _agrees(layout, given))
            if found.best:
                yield _Form(name, overrides, changed, found)
                break


def _given(run: PlannedRun) -> dict[str, str]:
    """key -> value of the run's own overrides."""
    pairs = (text.lstrip("+").partition("=") for text in run.arguments["overrides"])
    return {key: value for key, _, value in pairs}


def _agrees(layout: ParallelLayout | RolloutShape, given: Mapping[str, str]) -> bool:
    """Whether a layout has the sizes that are given; null leaves one open."""
    if isinstance(layout, ParallelLayout):
        sizes: dict[str, object] = {f"{ENGINE}.{axis}": getattr(layout, axis) for axis in TRAINING_AXES}
    else:
        sizes = {f"{ROLLOUT}.tensor_model_parallel_size": layout.tp, f"{ROLLOUT}.data_parallel_size": layout.dp}
        sizes[f"{ROLLOUT}.enable_expert_parallel"] = layout.has_expert_parallel
    return all(given.get(key, "null").lower() in ("null", value_text(size)) for key, size in sizes.items())

"""The tables of a plan, for the console and for the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby

from megatron.core.parallel_layout import ParallelLayout
from tools.plan.devices import GIB, LINKS
from tools.plan.rank_plan import RankPlan
from tools.plan.timing.constants import PhaseError
from tools.plan.timing.cost import StepTime, Variation
from tools.plan.whole import WholePlan

# Phase of a plan -> of the time model.
MODELLED_PHASES = {
    "prefill": "rollout",
    "decode": "rollout",
    "compute_log_prob": "old_log_prob",
    "compute_ref_log_prob": "reference",
    "update_actor": "update",
}


@dataclass(frozen=True)
class TextTable:
    """A title, the columns' names and the cells; a column whose first cell is a number is one of numbers."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def is_number(self, column: int) -> bool:
        """Whether the column is aligned to the right."""
        return bool(self.rows) and self.rows[0][column][:1].isdigit()


def state_table(plan: WholePlan) -> TextTable:
    """Bytes by owner on the device and on the host of each stage's rank."""
    rows = []
    for where in ("device", "host"):
        states = [rank.device_state if where == "device" else rank.host_state for rank in plan.stages]
        least = GIB // 1000 if where == "device" else 0
        for owner in dict.fromkeys(owner for state in states for owner in state):
            if any(state.get(owner, 0) >= least for state in states):
                rows.append((f"{where} {owner}", *(f"{state.get(owner, 0) / GIB:.2f}" for state in states)))
    return TextTable("State of a rank, GiB (exact), while it is there", ("where, what", *_stages(plan)), rows)


def phase_table(plan: WholePlan) -> TextTable:
    """The peak of each phase on each stage's rank, and the bytes after it."""
    rows, names = [], _stages(plan)
    for ranks in _alike(plan):
        for phases in zip(*(rank.phases for rank in ranks), strict=True):
            texts = (f"{phase.peak_bytes / GIB:.2f} {phase.after_bytes / GIB:.2f}" for phase in phases)
            cells = dict(zip((rank.name for rank in ranks), texts, strict=True))
            rows.append((phases[0].name, *(cells.get(name, "") for name in names)))
    return TextTable("Device memory by phase, GiB: the most, and what is left after it", ("phase", *names), rows)


def call_table(plan: WholePlan) -> TextTable:
    """The calls of each phase and their traffic."""
    counts: dict[str, int] = {}
    for rank in plan.stages:
        for calls in rank.calls:
            counts[calls.phase] = max(counts.get(calls.phase, 0), calls.count)
    rows = [
        (phase, f"{count:,}", *(f"{plan.traffic.get(phase, {}).get(link, 0) / 1e9:,.1f}" for link in LINKS))
        for phase, count in counts.items()
    ]
    title = "Calls to other ranks in a step (exact), and GB that the busiest rank's hold, by the slowest link"
    return TextTable(title, ("phase", "calls", *LINKS), rows)


def launch_table(plan: WholePlan, step: StepTime) -> TextTable:
    """What the host queues, on the stage with the most of each, and the time of that beside the phase's own."""
    rows = []
    for launches in chain(*(zip(*(rank.launches for rank in ranks), strict=True) for ranks in _alike(plan))):
        most = max(launches, key=lambda each: each.host_s)
        phase_s = step.seconds.get(MODELLED_PHASES[most.phase], 0.0)
        counts = (f"{most.each:,}", f"{most.per_layer:,.1f}", f"{most.times:,}")
        bound = "the host is slower" if most.host_s > phase_s else ""
        rows.append((f"{most.phase}, {most.unit}", *counts, f"{most.host_s:,.1f}", f"{phase_s:,.1f}", bound))
    columns = ("phase, unit", "launches", "a layer", "times", "host s", "phase s", "")
    return TextTable("Launches, 10 us of the host each, beside the phase's time (modelled)", columns, rows)


def time_table(step: StepTime) -> TextTable:
    """Seconds of each phase, their error among published rows and their largest terms; the whole step last."""
    rows = []
    for phase, seconds in step.seconds.items():
        if seconds > 0:
            mostly = ", ".join(f"{name} {spent:,.1f}" for name, spent in step.dominant(phase) if spent > 0.05 * seconds)
            rows.append((phase, f"{seconds:,.1f}", _off_by(step.errors.get(phase)), mostly))
    rate = f"{step.tokens_per_s_device:,.1f} tokens/s/device"
    rows.append(("step", f"{step.total_s:,.1f}", _off_by(step.errors.get("total")), rate))
    return TextTable("Time of a step (modelled)", ("phase", "seconds", "off by, of published rows", "mostly"), rows)


def variation_table(variations: Sequence[Variation]) -> TextTable:
    """What differs, seconds, change from the first, tokens per second and device."""
    _, first = variations[0]
    rows = [
        (
            what,
            f"{step.total_s:,.1f}",
            f"{step.total_s / first.total_s - 1:+.0%}" if step is not first else "",
            f"{step.tokens_per_s_device:,.1f}",
        )
        for what, step in variations
    ]
    return TextTable("Sensitivity", ("with", "seconds", "change", "tokens/s/device"), rows)


def layout_text(layout: ParallelLayout) -> str:
    """Sizes of the axes that are more than 1, and the layers of uneven stages: ``TP4 PP3 (6, 8 x 2)``."""
    sizes = {
        "TP": layout.tensor_model_parallel_size,
        "PP": layout.pipeline_model_parallel_size,
        "CP": layout.context_parallel_size,
        "DP": layout.data_parallel_size,
        "EP": layout.expert_model_parallel_size,
        "ETP": layout.expert_tensor_parallel_size,
    }
    text = " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1 or axis == "TP")
    runs = [(count, len(list(same))) for count, same in groupby(layout.num_layer_list or ())]
    if len(runs) < 2:
        return text
    return f"{text} ({', '.join(f'{count} x {times}' if times > 1 else str(count) for count, times in runs)})"


def _stages(plan: WholePlan) -> tuple[str, ...]:
    return tuple(rank.name for rank in plan.stages)


def _alike(plan: WholePlan) -> list[list[RankPlan]]:
    """The ranks that train, then the one that does not; those of a list have the same phases."""
    return [list(ranks) for _, ranks in groupby(plan.stages, key=lambda rank: rank.coords is None)]


def _off_by(error: PhaseError | None) -> str:
    """The largest leave-one-out error, and of how many published rows."""
    if error is None:
        return "no published row"
    return f"up to {error.error:.0%} ({error.rows} row{'s' if error.rows > 1 else ''})"

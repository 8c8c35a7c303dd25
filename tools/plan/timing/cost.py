"""``predict``: the seconds of a step and of each of its phases, what they go to, and how far off they may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tools.plan.devices import DeviceProfile
from tools.plan.timing.constants import Constants, PhaseError
from tools.plan.timing.rollout import rollout_seconds
from tools.plan.timing.run_shape import RunShape
from tools.plan.timing.training import log_prob_seconds, update_seconds
from tools.plan.timing.transitions import dispatch_seconds, offload_seconds, reward_seconds, weight_sync_seconds


@dataclass(frozen=True)
class StepTime:
    """A predicted step."""

    terms: Mapping[str, Mapping[str, float]]  # seconds of each phase, by what they go to
    total_s: float  # of the step; phases that run side by side count once
    tokens: float  # prompts and responses that the step trains on
    num_devices: int  # of the run
    # phase or ``total`` -> largest leave-one-out error among published rows of this device family, if there are any
    errors: Mapping[str, PhaseError] = field(default_factory=dict)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each phase."""
        return {phase: sum(terms.values()) for phase, terms in self.terms.items()}

    @property
    def tokens_per_s_device(self) -> float:
        """Tokens of prompts and responses for each second and device: verl's ``perf/throughput``."""
        return self.tokens / self.total_s / self.num_devices

    def dominant(self, phase: str, count: int = 3) -> list[tuple[str, float]]:
        """The largest terms of a phase."""
        return sorted(self.terms[phase].items(), key=lambda term: -term[1])[:count]


def predict(shape: RunShape, device: DeviceProfile, constants: Constants) -> StepTime:
    """The step of ``shape`` on ``device``. Pure arithmetic: milliseconds, for a search over thousands of shapes."""
    rates = constants.rates(device.family)
    log_prob = log_prob_seconds(shape, device, rates) | dispatch_seconds(shape, rates, is_update=False)
    terms: dict[str, dict[str, float]] = {
        "weight_sync": weight_sync_seconds(shape, rates),
        "offload": offload_seconds(shape, device, rates),
        "rollout": rollout_seconds(shape, device, rates),
        "reward": reward_seconds(shape, rates),
        "old_log_prob": log_prob if shape.has_old_log_prob else {},
        "reference": log_prob if shape.has_reference else {},
        "update": update_seconds(shape, device, rates) | dispatch_seconds(shape, rates, is_update=True),
    }
    seconds = {phase: sum(parts.values()) for phase, parts in terms.items()}
    total = sum(seconds.values())
    if shape.reward_workers:  # graded in processes of their own while log-probs are computed
        total -= min(seconds["reward"], seconds["old_log_prob"] + seconds["reference"])
    if shape.schedule != "sync":
        ahead = seconds["rollout"]  # other ranks generate at the same time
        total = seconds["weight_sync"] + max(ahead, total - ahead - seconds["weight_sync"])
    return StepTime(
        terms=terms,
        total_s=total,
        tokens=shape.num_sequences * shape.lengths.mean,
        num_devices=shape.num_devices,
        errors=constants.errors.get(device.family, {}),
    )

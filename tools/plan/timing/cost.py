"""``predict``: the seconds of a step and of each of its phases, what they go to, and how far off they may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from tools.plan.devices import DeviceProfile
from tools.plan.timing.constants import Constants, PhaseError
from tools.plan.timing.rollout import rollout_seconds
from tools.plan.timing.run_shape import RunShape
from tools.plan.timing.training import log_prob_seconds, update_seconds
from tools.plan.timing.transitions import dispatch_seconds, offload_seconds, reward_seconds, weight_sync_seconds

WIDER_SPREAD = 0.9  # of response lengths


@dataclass(frozen=True)
class StepTime:
    """A predicted step."""

    terms: Mapping[str, Mapping[str, float]]  # seconds of each phase, by what they go to
    total_s: float  # of the step; phases that run side by side count once
    tokens: float  # prompts and responses that the step trains on
    num_devices: int  # of the run
    updated_tokens: float  # that an update computes, where samples share their prompt
    # phase or ``total`` -> largest leave-one-out error among published rows of this device family, if there are any
    errors: Mapping[str, PhaseError] = field(default_factory=dict)
    speculation: str = ""  # what is expected of drafts, for people

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


Variation: TypeAlias = tuple[str, StepTime]  # what was changed, and the predicted step


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
        updated_tokens=shape.num_sequences * shape.computed_lengths(shape.train.update).mean,
        errors=constants.errors.get(device.family, {}),
    )


def sensitivity(shape: RunShape, device: DeviceProfile, constants: Constants) -> list[Variation]:
    """The shape as it is, then each variation that it allows."""
    load = shape.load_spread(constants.rates(device.family).expert_load_spread)
    lengths = shape.lengths
    longer = replace(
        lengths, response_mean=2.0 * lengths.response_mean, response_limit=int(2.0 * lengths.response_limit)
    )
    wider = replace(lengths, spread=WIDER_SPREAD)
    changed = [
        ("as it is", shape),
        *more_nodes(shape, device),
        ("twice the response length", replace(shape, lengths=longer)),
        (f"response lengths spread {WIDER_SPREAD} instead of {lengths.spread}", replace(shape, lengths=wider)),
    ]
    if (turns := lengths.turns) is not None:
        slower = replace(lengths, turns=replace(turns, tool_s=2 * turns.tool_s))
        changed.append(("tools twice as slow", replace(shape, lengths=slower)))
    if shape.model.n_routed_experts:
        changed += [
            ("experts loaded evenly", replace(shape, expert_load_spread=0.0)),
            ("experts loaded twice as unevenly", replace(shape, expert_load_spread=2 * load if load else 0.5)),
        ]
    if shape.rollout.has_graphs:
        changed.append(("decode without graphs", replace(shape, rollout=replace(shape.rollout, has_graphs=False))))
    if shape.rollout.num_drafts:
        plain = replace(shape.rollout, draft_method="", num_drafts=0)
        changed.append(("without drafts", replace(shape, rollout=plain)))
    if shape.dispatch == "direct":
        changed.append(("rows through the controller", replace(shape, dispatch="controller")))
    return [(what, predict(other, device, constants)) for what, other in changed if not other.problems()]


def more_nodes(shape: RunShape, device: DeviceProfile) -> list[tuple[str, RunShape]]:
    """The fewest further nodes over which the layout divides: more data-parallel ranks, more rollout replicas.

    Empty when twice the nodes would not do.
    """
    layout, rollout = shape.train.layout, shape.rollout
    nodes = layout.world_size // device.devices_per_node
    for more in range(1, nodes + 1):
        added = more * device.devices_per_node
        wider = replace(
            shape,
            train=replace(shape.train, layout=replace(layout, world_size=layout.world_size + added)),
            rollout=replace(rollout, world_size=rollout.world_size + (added if shape.schedule == "sync" else 0)),
        )
        if not wider.problems():
            return [(f"{more} more node{'s' if more > 1 else ''}", wider)]
    return []

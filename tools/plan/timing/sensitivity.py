"""What a step would take if one thing were otherwise: one question, one changed shape."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from tools.plan.devices import DeviceProfile
from tools.plan.timing.constants import Constants
from tools.plan.timing.cost import StepTime, predict
from tools.plan.timing.run_shape import RunShape

WIDER_SPREAD = 0.9
Variation: TypeAlias = tuple[str, StepTime]  # what was changed, and the predicted step


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
    if shape.model.n_routed_experts:
        changed += [
            ("experts loaded evenly", replace(shape, expert_load_spread=0.0)),
            ("experts loaded twice as unevenly", replace(shape, expert_load_spread=2 * load if load else 0.5)),
        ]
    if shape.rollout.has_graphs:
        changed.append(("decode without graphs", replace(shape, rollout=replace(shape.rollout, has_graphs=False))))
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

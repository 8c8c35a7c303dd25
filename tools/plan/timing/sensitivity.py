"""What a step would take if one thing were otherwise: one question, one changed shape."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tools.plan.devices import DeviceProfile
from tools.plan.timing.constants import Constants
from tools.plan.timing.cost import StepTime, predict
from tools.plan.timing.run_shape import RunShape

WIDER_SPREAD = 0.9


@dataclass(frozen=True)
class Variation:
    """A changed run: what was changed, its shape and its predicted step."""

    what: str
    shape: RunShape
    step: StepTime


def sensitivity(shape: RunShape, device: DeviceProfile, constants: Constants) -> list[Variation]:
    """The shape as it is, then each variation that it allows."""
    load = shape.expert_load_spread
    if load is None:
        load = constants.rates(device.family).expert_load_spread
    changed = [
        ("as it is", shape),
        *more_nodes(shape, device),
        ("twice the response length", longer_responses(shape, 2.0)),
        (f"response lengths spread {WIDER_SPREAD} instead of {shape.lengths.spread}", wider_lengths(shape)),
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
    possible = [(what, other) for what, other in changed if not other.problems()]
    return [Variation(what, other, predict(other, device, constants)) for what, other in possible]


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


def longer_responses(shape: RunShape, factor: float) -> RunShape:
    """Mean and limit of the response lengths times ``factor``."""
    lengths = shape.lengths
    return replace(
        shape,
        lengths=replace(
            lengths,
            response_mean=factor * lengths.response_mean,
            response_limit=int(factor * lengths.response_limit),
        ),
    )


def wider_lengths(shape: RunShape) -> RunShape:
    """Response lengths of the same mean that differ more."""
    return replace(shape, lengths=replace(shape.lengths, spread=WIDER_SPREAD))


def ranked(shapes: Iterable[RunShape], device: DeviceProfile, constants: Constants) -> list[tuple[RunShape, StepTime]]:
    """Shapes with their predicted steps, most tokens a second and device first; for a search over layouts."""
    timed = [(shape, predict(shape, device, constants)) for shape in shapes]
    return sorted(timed, key=lambda pair: -pair[1].tokens_per_s_device)

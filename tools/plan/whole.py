"""The plan of a whole run: a rank of every pipeline stage, whether their calls fit together, and whether they fit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache, partial

from megatron.core.parallel_layout import ParallelLayout
from mindspeed_llm.conversion.pool import run_tasks
from tools.plan.collectives import Collective
from tools.plan.devices import GIB, DeviceProfile
from tools.plan.matching import Phase
from tools.plan.matching import problems as call_problems
from tools.plan.rank_plan import RankPlan, plan_rank
from tools.plan.repeated import RepeatedCalls
from tools.plan.setup import PlannedRun
from tools.plan.training import OLD, REF, UPDATE, StepSize
from verl.trainer.config import PPOTrainerConfig

PROCESS_BYTES = 3 * GIB  # a worker's memory beside its tensors: Python, torch, communicators; modelled, see README
CHECKED_MINI_BATCHES = 2
CHECKED_REPEATS = 3  # beyond the fewest micro-batches or steps that show what every further one adds


@dataclass(frozen=True)
class WholePlan:
    """What a run needs, rank by rank.

    stages: the plan of the first rank of each pipeline stage; the others of a stage hold and do the same ·
    num_parameters: the model's, every one counted once · problems: why the run cannot work, one sentence each ·
    traffic: phase -> link ("node", "domain", "cluster") -> bytes that the busiest rank passes on in a step.
    """

    run: PlannedRun
    size: StepSize
    stages: tuple[RankPlan, ...]
    num_parameters: int
    problems: tuple[str, ...]
    traffic: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def layout(self) -> ParallelLayout:
        """The training layout."""
        return self.run.config.training_layout

    @property
    def is_whole(self) -> bool:
        """Whether every stage was planned."""
        return len(self.stages) == self.layout.pipeline_model_parallel_size

    @property
    def warnings(self) -> list[str]:
        """What works but is slow."""
        return slow_groups(self.layout, self.run)

    @property
    def worst(self) -> RankPlan:
        """The rank whose device is fullest at some time."""
        return max(self.stages, key=lambda plan: plan.peak.peak_bytes)

    @property
    def headroom_bytes(self) -> int:
        """What the worst rank leaves free at its peak; negative when it does not fit."""
        return self.run.device.budget_bytes - self.worst.peak.peak_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory of the fullest node: its ranks' tensors and their processes."""
        assert self.is_whole, len(self.stages)
        return max(host_bytes_of_nodes(self.run.config, self.stages), default=0)


def plan_run(
    run: PlannedRun, size: StepSize, processes: int | None = None, *, ends_when_full: bool = False
) -> WholePlan:
    """Plans a rank of every stage and checks them together; ``processes`` at a time, by default the machine's cores.

    ends_when_full: the first rank that is too full ends it; ``is_whole`` then says that stages are missing.
    """
    layout = run.config.training_layout
    found = layout_problems(layout, run)
    if found:
        return WholePlan(run, size, (), 0, tuple(found))
    ranks = layout.members(0, ("pp",))  # the first of each stage
    planned: list[RankPlan] = []
    try:
        for plan in _plan_ranks(run, size, ranks, processes or os.cpu_count() or 1):
            planned.append(plan)
            if ends_when_full and plan.peak.peak_bytes > run.device.budget_bytes:
                break
    except ValueError as error:
        return WholePlan(run, size, (), 0, (str(error),))
    stages = tuple(sorted(planned, key=lambda plan: plan.rank))
    if len(stages) < len(ranks):
        return WholePlan(run, size, stages, 0, tuple(_full_ranks(run, stages)))
    total = sum(plan.num_parameters for plan in stages)
    found = [*_memory_problems(run, stages), *call_problems(calls_between_stages(layout, stages))]
    return WholePlan(run, size, stages, total, tuple(found), _traffic(run, stages))


def layout_problems(layout: ParallelLayout, run: PlannedRun) -> list[str]:
    """Every size of the layout that does not divide what it must."""
    hf = run.hf
    found = layout.problems(hf.num_hidden_layers, hf.n_routed_experts or None, hf.num_attention_heads, hf.vocab_size)
    rollout_tp = run.config.actor_rollout_ref.rollout.tensor_model_parallel_size
    if rollout_tp and run.config.trainer.world_size % rollout_tp:
        found.append(f"world size {run.config.trainer.world_size} is not a multiple of rollout TP {rollout_tp}")
    return found


def slow_groups(layout: ParallelLayout, run: PlannedRun) -> list[str]:
    """Tensor parallelism over more devices than the fast links join: it works, and every layer waits for slow links."""
    domain = max(run.device.devices_per_node, run.device.domain_devices)
    found = []
    for phase, what, tp in (
        ("update_actor", "tensor_model_parallel_size", layout.tensor_model_parallel_size),
        (
            "decode",
            "rollout.tensor_model_parallel_size",
            run.config.actor_rollout_ref.rollout.tensor_model_parallel_size,
        ),
    ):
        if tp > domain:
            found.append(
                f"{what} is {tp}: the all_reduces of rank 0's group in {phase} leave the node; the fast links of "
                f"{run.device.name} join {domain} devices"
            )
        elif tp > 1 and domain % tp:
            found.append(f"{what} is {tp}: in {phase} groups of so many cross the borders of {domain} joined devices")
    return found


def _plan_ranks(run: PlannedRun, size: StepSize, ranks: Sequence[int], processes: int) -> Iterator[RankPlan]:
    """Plans of ``ranks`` from new worker processes, which end with this generator.

    The second rank, which often is the fullest, comes right after the first, then the last.
    """
    order = [str(rank) for rank in (*ranks[:2], *ranks[:1:-1])]
    work = partial(_plan_task, run.config, run.device, size)
    done: dict[str, RankPlan] = {}
    with closing(run_tasks(work, order, processes, on_bytes=lambda _: None)) as planned:
        for rank in order:
            while rank not in done:
                done.update([next(planned)])
            yield done[rank]


def _plan_task(
    config: PPOTrainerConfig, device: DeviceProfile, size: StepSize, rank: str, report: Callable[[int], None]
) -> RankPlan:
    return plan_rank(config, device, int(rank), size)


def host_bytes_of_nodes(config: PPOTrainerConfig, stages: Sequence[RankPlan]) -> list[int]:
    """Host memory of each node's ranks."""
    layout = config.training_layout
    of_stage = {plan.coords.pp: plan.host_bytes + PROCESS_BYTES for plan in stages}
    per_node = config.trainer.n_gpus_per_node
    return [
        sum(of_stage[layout.stage(rank)] for rank in range(first, first + per_node))
        for first in range(0, layout.world_size, per_node)
    ]


def _memory_problems(run: PlannedRun, stages: Sequence[RankPlan]) -> list[str]:
    device, found = run.device, _full_ranks(run, stages)
    fullest = max(host_bytes_of_nodes(run.config, stages), default=0)
    if fullest > device.host_memory_bytes:
        found.append(
            f"a node's ranks need {fullest / GIB:.0f} GiB of host memory; it has {device.host_memory_bytes / GIB:.0f}"
        )
    return found


def _full_ranks(run: PlannedRun, stages: Sequence[RankPlan]) -> list[str]:
    device = run.device
    return [
        f"rank {plan.rank} (stage {plan.coords.pp}) needs {plan.peak.peak_bytes / GIB:.1f} GiB in {plan.peak.name}; "
        f"a {device.name} has {device.budget_bytes / GIB:.1f} for it ({device.memory_bytes / GIB:.0f} less "
        f"{device.reserved_bytes / GIB:.0f} of the driver and communicators)"
        for plan in stages
        if plan.peak.peak_bytes > device.budget_bytes
    ]


def calls_between_stages(layout: ParallelLayout, stages: Sequence[RankPlan]) -> dict[int, list[Phase]]:
    """The calls between stages, as if each stage were one rank: within a stage all members make the same calls."""
    counts: dict[str, int] = {}
    for plan in stages:
        for calls in plan.calls:
            counts[calls.phase] = max(counts.get(calls.phase, 0), calls.outside + CHECKED_REPEATS)
    return {
        plan.coords.pp: [
            Phase(calls.phase, tuple(_projected(calls, counts[calls.phase], layout, plan))) for calls in plan.calls
        ]
        for plan in stages
    }


def _projected(calls: RepeatedCalls, count: int, layout: ParallelLayout, plan: RankPlan) -> Iterator[Collective]:
    """The calls that cross stages, with stages for ranks. Sizes are kept where all ranks of a stage have the same.

    In a weight sync each rank sends its own parts, and in a generation each replica has its own number of tokens.
    """
    has_sizes = calls.phase in (OLD, REF, UPDATE)
    for call in calls.of(count, CHECKED_MINI_BATCHES):
        others = (plan.rank, call.peer) if call.peer >= 0 else call.ranks
        crossed = _stages_of(layout, tuple(others))
        if len(crossed) == 1:
            continue
        if call.peer >= 0:
            (peer,) = set(crossed) - {plan.coords.pp}
            yield call._replace(peer=peer, ranks=crossed)
        elif has_sizes:
            yield call._replace(ranks=crossed)
        else:
            yield call._replace(ranks=crossed, splits=None, sent=0, received=0)


@lru_cache(maxsize=1024)
def _stages_of(layout: ParallelLayout, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The pipeline stages of ``ranks``, ascending."""
    return tuple(sorted({layout.stage(rank) for rank in ranks}))


def _traffic(run: PlannedRun, stages: Sequence[RankPlan]) -> dict[str, dict[str, int]]:
    """Bytes of the busiest rank's calls, by phase and by the slowest link of their groups."""
    found: dict[str, dict[str, int]] = {}
    for plan in stages:
        for calls in plan.calls:
            by_link = _by_link(run.device, plan.rank, calls)
            largest = found.setdefault(calls.phase, {})
            for link, num_bytes in by_link.items():
                largest[link] = max(largest.get(link, 0), num_bytes)
    return found


def _by_link(device: DeviceProfile, rank: int, calls: RepeatedCalls) -> dict[str, int]:
    sums: dict[str, int] = {}
    for call, times in calls.counted():
        others = (rank, call.peer) if call.peer >= 0 else call.ranks
        if len(others) > 1:
            link = _slowest_link(device, min(others), max(others))
            sums[link] = sums.get(link, 0) + call.num_bytes * times
    return sums


def _slowest_link(device: DeviceProfile, first: int, last: int) -> str:
    if first // device.devices_per_node == last // device.devices_per_node:
        return "node"
    return "domain" if first // device.domain_devices == last // device.domain_devices else "cluster"

"""The plan of a whole run: a rank of every pipeline stage, whether their calls fit together, and whether they fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from hf_formats.cores import usable_cores
from megatron.core.parallel_layout import ParallelLayout
from mindspeed_llm.conversion.pool import run_tasks
from tools.plan.collectives import Collective
from tools.plan.devices import GIB, DeviceProfile
from tools.plan.matching import Phase
from tools.plan.matching import problems as call_problems
from tools.plan.rank_plan import RankPlan, plan_rank
from tools.plan.setup import PlannedRun
from tools.plan.training import OLD, REF, UPDATE, StepSize
from verl.trainer.config import PPOTrainerConfig

PROCESS_BYTES = 3 * GIB  # a worker's memory without its tensors: Python, torch, communicators; modelled, see README


@dataclass(frozen=True)
class WholePlan:
    """What a run needs, rank by rank.

    stages: the plan of the first rank of each pipeline stage, and of the first that only generates where some do; the
    others of a stage hold and do the same ·
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
        return self.run.config.training_layout

    @property
    def is_whole(self) -> bool:
        """Whether every stage was planned."""
        return len(self.stages) == len(_planned_ranks(self.run.config))

    @property
    def warnings(self) -> list[str]:
        """What works but is slow."""
        return slow_groups(self.run)

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
        of_stage = {stage_of(self.layout, plan.rank): plan.host_bytes + PROCESS_BYTES for plan in self.stages}
        config = self.run.config
        first, per_node = config.trainer.world_size, config.trainer.n_gpus_per_node
        nodes = [range(rank, rank + per_node) for rank in range(0, first, per_node)]
        nodes += [range(first, first + config.rollout.n_gpus_per_node)] if config.has_rollout_ranks else []
        return max(sum(of_stage[stage_of(self.layout, rank)] for rank in node) for node in nodes)


def plan_run(run: PlannedRun, size: StepSize, *, ends_when_full: bool = False) -> WholePlan:
    """Plans a rank of every stage, as many at a time as the machine has cores, and checks them together.

    ends_when_full: the first rank that is too full ends it; ``is_whole`` then says that stages are missing.
    """
    layout, budget = run.config.training_layout, run.device.budget_bytes
    if found := layout_problems(run):
        return WholePlan(run, size, (), 0, tuple(found))
    ranks = _planned_ranks(run.config)
    planned: list[RankPlan] = []
    try:
        for plan in _plan_ranks(run, size, ranks):
            planned.append(plan)
            if ends_when_full and plan.peak.peak_bytes > budget:
                break
    except ValueError as error:
        return WholePlan(run, size, (), 0, (str(error),))
    stages = tuple(sorted(planned, key=lambda plan: plan.rank))
    found = [
        f"rank {plan.rank} ({plan.name}) needs {plan.peak.peak_bytes / GIB:.1f} GiB in {plan.peak.name}; "
        f"a {run.device.name} has {budget / GIB:.1f} for it ({run.device.memory_bytes / GIB:.0f} less "
        f"{run.device.reserved_bytes / GIB:.0f} of the driver)"
        for plan in stages
        if plan.peak.peak_bytes > budget
    ]
    if len(stages) < len(ranks):
        return WholePlan(run, size, stages, 0, tuple(found))
    whole = WholePlan(run, size, stages, sum(plan.num_parameters for plan in stages), (), _traffic(stages))
    if whole.host_bytes > run.device.host_memory_bytes:
        needs, has = whole.host_bytes / GIB, run.device.host_memory_bytes / GIB
        found.append(f"a node's ranks need {needs:.0f} GiB of host memory; it has {has:.0f}")
    return replace(whole, problems=(*found, *call_problems(calls_between_stages(layout, stages))))


def layout_problems(run: PlannedRun) -> list[str]:
    """Every size of the layout that does not divide what it must."""
    hf = run.hf
    found = run.config.training_layout.problems(
        hf.num_hidden_layers, hf.n_routed_experts or None, hf.num_attention_heads, hf.vocab_size
    )
    world_size, tp = run.config.rollout_world_size, run.config.actor_rollout_ref.rollout.tensor_model_parallel_size
    if tp and world_size % tp:
        found.append(f"world size {world_size} is not a multiple of rollout TP {tp}")
    return found


def slow_groups(run: PlannedRun) -> list[str]:
    """Tensor parallelism over more devices than the fast links join: it works, and every layer waits for slow links."""
    domain = max(run.device.devices_per_node, run.device.domain_devices)
    training, rollout = run.config.training_layout, run.config.actor_rollout_ref.rollout
    found = []
    for phase, what, tp in (
        (UPDATE, "tensor_model_parallel_size", training.tensor_model_parallel_size),
        ("decode", "rollout.tensor_model_parallel_size", rollout.tensor_model_parallel_size),
    ):
        if tp > domain:
            found.append(
                f"{what} is {tp}: the all_reduces of rank 0's group in {phase} leave the node; the fast links of "
                f"{run.device.name} join {domain} devices"
            )
        elif tp > 1 and domain % tp:
            found.append(f"{what} is {tp}: in {phase} groups of so many cross the borders of {domain} joined devices")
    return found


def _plan_ranks(run: PlannedRun, size: StepSize, ranks: Sequence[int]) -> Iterator[RankPlan]:
    """Plans of ``ranks`` from new worker processes, which end with this generator.

    The second rank, which often is the fullest, comes right after the first, then the last.
    """
    order = [str(rank) for rank in (*ranks[:2], *ranks[:1:-1])]
    work = partial(_plan_task, run.config, run.device, size)
    done: dict[str, RankPlan] = {}
    with closing(run_tasks(work, order, usable_cores(), on_bytes=lambda _: None)) as planned:
        for rank in order:
            while rank not in done:
                done.update([next(planned)])
            yield done[rank]


def _plan_task(
    config: PPOTrainerConfig, device: DeviceProfile, size: StepSize, rank: str, report: Callable[[int], None]
) -> RankPlan:
    return plan_rank(config, device, int(rank), size)


def calls_between_stages(layout: ParallelLayout, stages: Sequence[RankPlan]) -> dict[int, list[Phase]]:
    """The calls between stages, as if each stage were one rank: within a stage all members make the same calls."""
    return {
        stage_of(layout, plan.rank): [
            Phase(calls.phase, tuple(_projected(calls.phase, sample, layout, plan)))
            for calls in plan.calls
            for sample in calls.samples
        ]
        for plan in stages
    }


def _projected(phase: str, calls: Sequence[Collective], layout: ParallelLayout, plan: RankPlan) -> Iterator[Collective]:
    """The calls that cross stages, with stages for ranks. Sizes are kept where all ranks of a stage have the same.

    In a weight sync each rank sends its own parts, and in a generation each replica has its own number of tokens.
    """
    has_sizes = phase in (OLD, REF, UPDATE)
    for call in calls:
        crossed = _stages_of(layout, (plan.rank, call.peer) if call.peer >= 0 else call.ranks)
        if len(crossed) == 1:
            continue
        call = call._replace(ranks=crossed, peer=stage_of(layout, call.peer) if call.peer >= 0 else -1)
        yield call if has_sizes or call.peer >= 0 else call._replace(splits=None, sent=0, received=0)


@lru_cache(maxsize=1024)
def _stages_of(layout: ParallelLayout, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The pipeline stages of ``ranks``, ascending."""
    return tuple(sorted({stage_of(layout, rank) for rank in ranks}))


def stage_of(layout: ParallelLayout, rank: int) -> int:
    """The pipeline stage of ``rank``; after the last one for ranks that only generate."""
    return layout.stage(rank) if rank < layout.world_size else layout.pipeline_model_parallel_size


def _planned_ranks(config: PPOTrainerConfig) -> tuple[int, ...]:
    """The first rank of each stage, and the first that only generates."""
    first_others = (config.trainer.world_size,) if config.has_rollout_ranks else ()
    return (*config.training_layout.members(0, ("pp",)), *first_others)


def _traffic(stages: Sequence[RankPlan]) -> dict[str, dict[str, int]]:
    """Bytes of the busiest rank's calls, by phase and by the slowest link of their groups."""
    found: dict[str, Counter[str]] = {}
    for plan in stages:
        for calls in plan.calls:
            found[calls.phase] = found.get(calls.phase, Counter()) | Counter(calls.link_bytes)  # the larger ones
    return {phase: dict(num_bytes) for phase, num_bytes in found.items()}

"""One rank of a run from its start to the end of a step: bytes by owner and by phase, and every call to other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, gcd
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.core.memory_ledger import ON_DEVICE, ON_HOST, LedgerEntry, ledger
from megatron.core.parallel_layout import RankCoords
from tools.plan.collectives import Collective, CollectiveLog
from tools.plan.device import MemoryMeter, PlannedDevice
from tools.plan.devices import KINDS, LINKS, DeviceProfile
from tools.plan.launches import Launches
from tools.plan.phase_calls import PhaseCalls, link_bytes
from tools.plan.platform import PLATFORMS
from tools.plan.rollout import RolloutPlan, plan_rollout
from tools.plan.sync import planned_sync
from tools.plan.timing.run_shape import MicroBatches
from tools.plan.training import OLD, UPDATE, StepSize, batch_of, training_calls
from tools.plan.worker import PhaseMemory, PlannedRolloutWorker, PlannedTrainingWorker, PlannedWorker
from tools.plan.world import planned_rank, run_variables
from verl.trainer.config import PPOTrainerConfig
from verl.utils.device import group_backend
from vllm.distributed.parallel_state import GROUP_PREFIX
from vllm.platforms import resolve_platform

MOST_WHOLE = 4  # micro-batches of a call that is always run whole


@dataclass(frozen=True)
class RankPlan:
    """What one rank holds and does in a step.

    coords: None on a rank that does not train · num_parameters: the parameters that this rank counts, so that the sum
    over the stages is the model's · device_state, host_state: owner -> bytes while it is there · phases: the step's
    phases in order; a phase within another comes before it · calls: the collectives of each phase · sync_bytes: see
    ``planned_sync`` · launches: where they are known, on Ascend.
    """

    rank: int
    coords: RankCoords | None
    num_parameters: int
    device_state: dict[str, int]
    host_state: dict[str, int]
    phases: tuple[PhaseMemory, ...]
    calls: tuple[PhaseCalls, ...]
    sync_bytes: dict[str, int]
    launches: tuple[Launches, ...] = ()

    @property
    def name(self) -> str:
        """The rank's pipeline stage, or what it does instead."""
        return "rollout" if self.coords is None else f"stage {self.coords.pp}"

    @property
    def peak(self) -> PhaseMemory:
        """The phase in which most lies on the device."""
        return max(self.phases, key=lambda phase: phase.peak_bytes)

    @property
    def host_bytes(self) -> int:
        """Host memory of this rank's tensors."""
        return sum(self.host_state.values())


class _Run(NamedTuple):
    """A training call that was made. totals: int64 of the number of calls, bytes by ``LINKS``, number of launches."""

    calls: tuple[Collective, ...]
    totals: NDArray[np.int64]


def plan_rank(config: PPOTrainerConfig, device: DeviceProfile, rank: int, size: StepSize) -> RankPlan:
    """Builds ``rank`` and runs its step on a planned device; takes seconds for a stage of 671B parameters.

    ValueError when the run would refuse: what does not divide, or a rollout engine without room for its cache.
    """
    kind, trainer = KINDS[device.family], config.trainer
    buffers = partial(buffer_bytes, kind)
    planned = PlannedDevice(CollectiveLog(), MemoryMeter(), has_host_memory=kind != "cpu", buffer_bytes=buffers)
    platform = PLATFORMS[kind](device.memory_bytes, device.reserved_bytes, planned)
    variables = run_variables(device.family)
    with planned_rank(rank, config.num_devices, trainer.n_gpus_per_node, variables), planned:
        if rank >= trainer.world_size:
            generating = PlannedRolloutWorker(config, kind, size.load, platform)
            generating.init_model()
            return _plan_rollout_rank(generating, device, size)
        worker = (PlannedTrainingWorker if config.has_rollout_ranks else PlannedWorker)(
            config, kind, size.load, platform
        )
        worker.init_model()
        return _plan_training_rank(worker, device, size)


def _plan_training_rank(worker: PlannedWorker, device: DeviceProfile, size: StepSize) -> RankPlan:
    """The plan of a rank that trains, and generates before that where no other ranks do."""
    config, planned = worker.run_config, worker.platform.planned
    worker.timeline.phases.clear()
    worker.timeline.owners = worker.device_owners
    if config.has_rollout_ranks:
        sync_bytes, sync_calls = planned_sync(worker.sync)
        calls, launches = [PhaseCalls.of("weight_sync", sync_calls, worker.rank, device)], list[Launches]()
        with worker.generating():
            rollout_state: dict[str, int] = {}
    else:
        rows = (size.prompt_length, size.response_length, size.acceptance)
        rollout = plan_rollout(worker, _generated_rows(config), *rows)
        sync_bytes, rollout_state = rollout.sync_bytes, _rollout_state(rollout)
        calls, launches = _rollout_calls(worker, rollout, device)
    for name in training_calls(config):
        training, training_launches = _plan_training(worker, device, name, size)
        calls.append(training)
        launches += training_launches
    with worker.timeline.span("save"):
        worker.onload_training_state()
    worker.actor_module.onload_grads()
    held = ledger(worker.actor_module, worker.optimizer)
    reference = {} if worker.ref is None else {"reference": worker.ref_weights.host_bytes}
    return RankPlan(
        worker.rank,
        worker.groups.coords,
        _counted_parameters(worker),
        _by_owner(held, ON_DEVICE) | {"communicators": planned.communicator_bytes} | reference | rollout_state,
        _by_owner(held, ON_HOST) | reference,
        tuple(worker.timeline.phases),
        tuple(calls),
        sync_bytes,
        tuple(launches) if worker.kind == "npu" else (),
    )


def _plan_rollout_rank(worker: PlannedRolloutWorker, device: DeviceProfile, size: StepSize) -> RankPlan:
    """The plan of a rank that generates while others train; it has no coordinates in training's layout."""
    config, planned = worker.run_config, worker.platform.planned
    worker.timeline.phases.clear()
    worker.timeline.owners = worker.device_owners
    rows = (size.prompt_length, size.response_length, size.acceptance)
    rollout = plan_rollout(worker, _generated_rows(config), *rows)
    calls, launches = _rollout_calls(worker, rollout, device)
    return RankPlan(
        worker.rank,
        None,
        0,
        {"communicators": planned.communicator_bytes} | _rollout_state(rollout),
        {},
        tuple(worker.timeline.phases),
        tuple(calls),
        rollout.sync_bytes,
        tuple(launches) if worker.kind == "npu" else (),
    )


def _generated_rows(config: PPOTrainerConfig) -> int:
    """Rows that a replica generates at a time at most: a step's, or all that may be started before the next sync."""
    prompts = config.gen_batch_size
    if config.has_rollout_ranks:
        ahead = config.async_config
        per_sync = config.data.train_batch_size * ahead.trigger_parameter_sync_step
        prompts += ceil(per_sync * (1 + ahead.staleness_threshold)) - config.data.train_batch_size
    return ceil(prompts * config.actor_rollout_ref.rollout.n / config.rollout_replicas)


def _rollout_calls(
    worker: PlannedWorker | PlannedRolloutWorker, rollout: RolloutPlan, device: DeviceProfile
) -> tuple[list[PhaseCalls], list[Launches]]:
    calls, launches = [PhaseCalls.of("weight_sync", rollout.sync_calls, worker.rank, device)], list[Launches]()
    for name, step in (("prefill", rollout.prefill), ("decode", rollout.decode)):
        if step is not None:
            calls.append(PhaseCalls.of(name, step.calls, worker.rank, device, step.num_steps))
            layers = worker.rollout.inference_engine.config.model.hf.num_hidden_layers
            launches.append(Launches(name, "step", step.launches, step.num_steps, layers))
    return [*calls, PhaseCalls.of("generate_end", rollout.closing_calls, worker.rank, device)], launches


def _rollout_state(rollout: RolloutPlan) -> dict[str, int]:
    return {f"rollout {owner}": num_bytes for owner, num_bytes in rollout.state_bytes.items()}


def buffer_bytes(kind: str, group: str) -> int:
    """Device memory of the communicator of a group, as the engine that makes the group asks for it."""
    if group.startswith(GROUP_PREFIX):
        return resolve_platform(kind).group_buffer_bytes(group.removeprefix(GROUP_PREFIX))
    return group_backend(kind).buffer_bytes(group)


def _plan_training(
    worker: PlannedWorker, device: DeviceProfile, name: str, size: StepSize
) -> tuple[PhaseCalls, list[Launches]]:
    """A training call: a run with as many micro-batches as this rank holds at one time, whose memory is the call's, and
    smaller ones that show what each further micro-batch and mini-batch adds, and how the stages' calls fit together.

    Launches are those of a micro-batch, and those of the rest of a mini-batch: an optimizer's step or none.

    Raises:
        ValueError: micro-batches do not all add the same.
    """
    rows, per_micro, together = _micro_batches(worker.run_config, name, size, worker.actor.shares_prompts)
    layout, stage = worker.groups.layout, worker.groups.coords.pp
    actor, total, num_stages = worker.config.actor, -(-rows // per_micro), layout.pipeline_model_parallel_size
    unit = num_stages if layout.virtual_pipeline_model_parallel_size > 1 else 1  # that a schedule adds at a time
    held = (num_stages - stage if name == UPDATE else 1) + 1 if unit == 1 else 2 * unit
    held = total if total <= held + unit else held
    # The same on all stages: with three, stages between two others come to the middle of an update's schedule.
    num_shown = total if total <= MOST_WHOLE else max(2 * unit, 3)
    num_mini = _mini_batches(worker.run_config) if name == UPDATE else 1
    run = partial(_run, worker, device, name, size, together=together)
    worker.actor.config = replace(actor, ppo_epochs=1)
    first = one = run(min(rows, held * per_micro))
    step, num_launches = first.totals, first.totals[-1]
    with worker.timeline.paused():
        if total > unit and (total > max(held, num_shown) or num_mini > 1 or worker.kind == "npu"):
            one = run(unit * per_micro)
        shown = run(min(rows, num_shown * per_micro)) if num_shown != held else first
        if total == num_shown:
            step = shown.totals  # its last micro-batch may have fewer rows
        elif total > held:
            each = (shown.totals - one.totals) * unit // (num_shown - unit)
            step = first.totals + (total - held) // unit * each
            if (one.totals + (held - unit) // unit * each != first.totals)[:-1].any():
                raise ValueError(f"{name}: micro-batches make different calls")
        if total > unit and worker.kind == "npu":  # first runs launch what is made once, too
            num_launches = run(2 * unit * per_micro).totals[-1] - one.totals[-1]
        samples = [shown.calls]
        if num_mini > 1:
            least = min(unit * per_micro, rows)
            mini_batch_size = least * worker.groups.dp.size()
            worker.actor.config = replace(actor, ppo_epochs=1, ppo_mini_batch_size=mini_batch_size)
            two = run(2 * least, samples_per_prompt=1)
            samples.append(two.calls)
            step = step + (num_mini - 1) * (step - one.totals + two.totals - one.totals)
    worker.actor.config = actor
    count, *num_bytes, _ = step.tolist()
    calls = PhaseCalls(name, tuple(samples), count, dict(zip(LINKS, num_bytes, strict=True)))
    layers = len(layout.stage_layers(stage, worker.hf_config.num_hidden_layers))
    micro, rest = int(num_launches) // unit, int(max(0, one.totals[-1] - num_launches))
    return calls, [
        Launches(name, "micro-batch", micro, total * num_mini, layers),
        Launches(name, "call", rest, num_mini, layers),
    ]


def _mini_batches(config: PPOTrainerConfig) -> int:
    """Optimizer steps of an update."""
    actor = config.actor_rollout_ref.actor
    return -(-config.data.train_batch_size // actor.ppo_mini_batch_size) * actor.ppo_epochs


def _run(
    worker: PlannedWorker,
    device: DeviceProfile,
    name: str,
    size: StepSize,
    rows: int,
    *,
    together: int,
    samples_per_prompt: int | None = None,
) -> _Run:
    """A training call with ``rows`` rows, which is a phase of the timeline."""
    planned, batch = worker.platform.planned, batch_of(rows, size, worker.run_config, together)
    launches = planned.launches
    if samples_per_prompt is not None:
        batch.meta_info["rollout_n"] = samples_per_prompt
    if name == UPDATE and worker.config.actor.records_routing:
        with planned.log.paused(), worker.timeline.paused():
            worker.compute_log_prob(batch)  # an update replays the routing of these very rows
    with planned.log.apart() as calls:
        getattr(worker, name)(batch)
    num_bytes = link_bytes(calls, worker.rank, device)
    totals = (len(calls), *(num_bytes[link] for link in LINKS), planned.launches - launches)
    return _Run(tuple(calls), np.array(totals, dtype=np.int64))


def _micro_batches(config: PPOTrainerConfig, name: str, size: StepSize, shares_prompts: bool) -> tuple[int, int, int]:
    """(rows of one data-parallel rank in one pass of a training call, rows of a micro-batch, those that share a prompt
    there: as many as can where tokens limit a micro-batch, else as many as must).
    """
    models, layout = config.actor_rollout_ref, config.training_layout
    actor, scores = models.actor, models.rollout if name == OLD else models.ref
    if name == UPDATE:
        prompts, samples = actor.ppo_mini_batch_size, actor.ppo_micro_batch_size_per_gpu
        tokens = actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else 0
    else:
        prompts, samples = config.data.train_batch_size, scores.log_prob_micro_batch_size_per_gpu
        tokens = scores.log_prob_max_token_len_per_gpu if scores.log_prob_use_dynamic_bsz else 0
    rows = max(1, prompts * models.rollout.n // layout.data_parallel_size)
    most = gcd(models.rollout.n, actor.ppo_mini_batch_size * models.rollout.n // layout.data_parallel_size)
    most = most if shares_prompts and (tokens or not actor.shuffle) else 1
    together = MicroBatches(samples or rows, tokens).together(most, size.prompt_length, size.response_length)
    if tokens:
        unit = size.prompt_length + together * size.response_length
        samples = max(1, tokens * layout.context_parallel_size // unit) * together
    return rows, min(samples or rows, rows), together


def _counted_parameters(worker: PlannedWorker) -> int:
    """Elements of the checkpoint's tensors on this rank's stage, each counted once over all ranks of the stage."""
    layout, module = worker.groups.layout, worker.actor_module.module
    total = sum(buffer.numel() for name, buffer in module.named_buffers() if name.endswith("router.expert_bias"))
    for name, param in module.named_parameters():
        if getattr(param, "shared", False) or ".mtp." in f".{name}":
            continue
        if not getattr(param, "allreduce", True):
            parts = layout.expert_model_parallel_size * layout.expert_tensor_parallel_size
        else:
            parts = layout.tensor_model_parallel_size if getattr(param, "tensor_model_parallel", False) else 1
        total += param.numel() * parts
    return total


def _by_owner(entries: Sequence[LedgerEntry], place: str) -> dict[str, int]:
    found: Counter[str] = Counter()
    for entry in entries:
        if entry.device == place:
            found[entry.what] += entry.num_bytes
    return dict(found)

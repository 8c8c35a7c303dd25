"""One rank of a run from its start to the end of a step: bytes by owner and by phase, and every call to other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron.core.memory_ledger import ON_DEVICE, ON_HOST, LedgerEntry, ledger
from megatron.core.parallel_layout import RankCoords
from tools.plan.collectives import Collective, CollectiveLog
from tools.plan.device import MemoryMeter, PlannedDevice
from tools.plan.devices import KINDS, DeviceProfile
from tools.plan.launches import Launches
from tools.plan.platform import PLATFORMS
from tools.plan.repeated import RepeatedCalls, exact, repeated_within, steps, what_repeats
from tools.plan.rollout import RolloutPlan, plan_rollout
from tools.plan.training import OLD, UPDATE, StepSize, batch_of, training_calls
from tools.plan.worker import PhaseMemory, PlannedWorker
from tools.plan.world import planned_rank, run_variables
from verl.trainer.config import PPOTrainerConfig
from verl.utils.device import group_backend
from vllm.distributed.parallel_state import GROUP_PREFIX
from vllm.platforms import resolve_platform

MANY = 4  # from so many micro-batches on, two small runs are quicker than another large one


@dataclass(frozen=True)
class RankPlan:
    """What one rank holds and does in a step.

    num_parameters: the parameters that this rank counts, so that the sum over the stages is the model's · device_state,
    host_state: owner -> bytes while it is there · phases: the step's phases in order; a phase within another comes
    before it · calls: the collectives of each phase · sync_bytes: see ``planned_sync`` · launches: where they
    are known, on Ascend.
    """

    rank: int
    coords: RankCoords
    num_parameters: int
    device_state: dict[str, int]
    host_state: dict[str, int]
    phases: tuple[PhaseMemory, ...]
    calls: tuple[RepeatedCalls, ...]
    sync_bytes: dict[str, int]
    launches: tuple[Launches, ...] = ()

    @property
    def peak(self) -> PhaseMemory:
        """The phase in which most lies on the device."""
        return max(self.phases, key=lambda phase: phase.peak_bytes)

    @property
    def host_bytes(self) -> int:
        """Host memory of this rank's tensors."""
        return sum(self.host_state.values())


def plan_rank(config: PPOTrainerConfig, device: DeviceProfile, rank: int, size: StepSize) -> RankPlan:
    """Builds ``rank`` and runs its step on a planned device; takes seconds for a stage of 671B parameters.

    ValueError when the run would refuse: what does not divide, or a rollout engine without room for its cache.
    """
    kind, trainer = KINDS[device.family], config.trainer
    buffers = partial(buffer_bytes, kind)
    planned = PlannedDevice(CollectiveLog(), MemoryMeter(), has_host_memory=kind != "cpu", buffer_bytes=buffers)
    platform = PLATFORMS[kind](device.memory_bytes, device.reserved_bytes, planned)
    variables = run_variables(device.family)
    with planned_rank(rank, trainer.world_size, trainer.n_gpus_per_node, variables), planned:
        worker = PlannedWorker(config, kind, size.load, platform)
        worker.init_model()
        worker.timeline.phases.clear()
        worker.timeline.owners = worker.device_owners
        num_rows = config.gen_batch_size * config.actor_rollout_ref.rollout.n // config.rollout_replicas
        rollout = plan_rollout(worker, num_rows, size.prompt_length, size.response_length)
        calls = [exact("weight_sync", rollout.sync_calls)]
        for name, step in (("prefill", rollout.prefill), ("decode", rollout.decode)):
            if step is not None:
                calls.append(steps(name, step.calls, step.num_steps))
        calls.append(exact("generate_end", rollout.closing_calls))
        launches = _rollout_launches(rollout, worker.hf_config.num_hidden_layers) if kind == "npu" else []
        for name in training_calls(config):
            calls.append(_plan_update(worker, size) if name == UPDATE else _plan_call(worker, name, size))
            launches += _training_launches(worker, name, size) if kind == "npu" else []
        with worker.timeline.span("save"):
            worker.onload_training_state()
        worker.actor_module.onload_grads()
        held = ledger(worker.actor_module, worker.optimizer)
        reference = {} if worker.ref is None else {"reference": worker.ref_weights.host_bytes}
        rollout_state = {f"rollout {owner}": num_bytes for owner, num_bytes in rollout.state_bytes.items()}
        return RankPlan(
            rank,
            worker.groups.coords,
            _counted_parameters(worker),
            _by_owner(held, ON_DEVICE) | {"communicators": planned.communicator_bytes} | reference | rollout_state,
            _by_owner(held, ON_HOST) | reference,
            tuple(worker.timeline.phases),
            tuple(calls),
            rollout.sync_bytes,
            tuple(launches),
        )


def _rollout_launches(rollout: RolloutPlan, layers: int) -> list[Launches]:
    steps = (("prefill", "step", rollout.prefill), ("decode", "step", rollout.decode))
    return [Launches(name, unit, cost.launches, cost.num_steps, layers) for name, unit, cost in steps if cost]


def _training_launches(worker: PlannedWorker, name: str, size: StepSize) -> list[Launches]:
    """Launches of a micro-batch, by what a second one adds, and of the rest of a call: an optimizer's step or none."""
    rows, per_micro = _micro_batches(worker.run_config, name, size)
    layout, unit = worker.groups.layout, _unit(worker)
    counted = []
    actor = worker.config.actor
    worker.actor.config = replace(actor, ppo_epochs=1)
    with worker.timeline.paused():
        for count in (unit, 2 * unit):
            before = worker.platform.planned.launches
            _run(worker, name, count * per_micro, size)
            counted.append(worker.platform.planned.launches - before)
    worker.actor.config = actor
    is_one = -(-rows // per_micro) == 1  # more rows do not make more micro-batches then
    each, num_calls = counted[0] if is_one else (counted[1] - counted[0]) // unit, 1
    if name == UPDATE:
        num_calls = -(-worker.run_config.data.train_batch_size // actor.ppo_mini_batch_size) * actor.ppo_epochs
    layers = len(list(layout.stage_layers(worker.groups.coords.pp, worker.hf_config.num_hidden_layers)))
    micro = Launches(name, "micro-batch", each, -(-rows // per_micro) * num_calls, layers)
    return [micro, Launches(name, "call", max(0, counted[0] - each * unit), num_calls, layers)]


def buffer_bytes(kind: str, group: str) -> int:
    """Device memory of the communicator of a group, as the engine that makes the group asks for it."""
    if group.startswith(GROUP_PREFIX):
        return resolve_platform(kind).group_buffer_bytes(group.removeprefix(GROUP_PREFIX))
    return group_backend(kind).buffer_bytes(group)


def _plan_call(worker: PlannedWorker, name: str, size: StepSize) -> RepeatedCalls:
    """A training call with as many micro-batches as its pipeline holds at one time, and what every further one adds.

    The second of two runs has one micro-batch more (with virtual stages, one for each stage), and its additional calls
    are those that every further one adds. In a deep pipeline two small runs show which of the calls these are.
    """
    rows, per_micro = _micro_batches(worker.run_config, name, size)
    total = -(-rows // per_micro)
    num_stages = worker.groups.layout.pipeline_model_parallel_size
    unit = _unit(worker)
    in_flight = num_stages - worker.groups.coords.pp if name == UPDATE else 1
    few = 2 * num_stages if unit > 1 else in_flight + 1
    if total <= few + unit:
        return exact(name, _run(worker, name, rows, size))
    before = _run(worker, name, few * per_micro, size)
    parts = None
    with worker.timeline.paused():  # these runs need no more memory
        if few > MANY and unit == 1:
            one, two = (_run(worker, name, count * per_micro, size) for count in (1, 2))
            parts = repeated_within(before, one, two)
        if parts is None:
            parts = what_repeats(before, _run(worker, name, (few + unit) * per_micro, size))
    return RepeatedCalls(name, parts, total // unit, few // unit)


def _unit(worker: PlannedWorker) -> int:
    """How many micro-batches a schedule adds at a time."""
    layout = worker.groups.layout
    return layout.pipeline_model_parallel_size if layout.virtual_pipeline_model_parallel_size > 1 else 1


def _plan_update(worker: PlannedWorker, size: StepSize) -> RepeatedCalls:
    """An update: one mini-batch as ``_plan_call`` plans it, repeated.

    Two more runs, with one and with two of the smallest mini-batches, show what comes before and after all of them.
    """
    config = worker.run_config
    actor = config.actor_rollout_ref.actor
    worker.actor.config = replace(actor, ppo_epochs=1)
    calls = _plan_call(worker, UPDATE, size)
    num_mini_batches = -(-config.data.train_batch_size // actor.ppo_mini_batch_size) * actor.ppo_epochs
    if num_mini_batches > 1:
        most, per_micro = _micro_batches(config, UPDATE, size)
        rows = min(per_micro * _unit(worker), most)
        mini_batch_size = rows * worker.groups.dp.size()
        worker.actor.config = replace(actor, ppo_epochs=1, ppo_mini_batch_size=mini_batch_size)
        with worker.timeline.paused():
            one, two = (_run(worker, UPDATE, count * rows, size, samples_per_prompt=1) for count in (1, 2))
        calls = calls.repeated(num_mini_batches, one, two)
    worker.actor.config = actor
    return calls


def _run(
    worker: PlannedWorker, name: str, rows: int, size: StepSize, *, samples_per_prompt: int | None = None
) -> tuple[Collective, ...]:
    """The collectives of a training call with ``rows`` rows, which is a phase of the timeline."""
    log, batch = worker.platform.planned.log, batch_of(rows, size, worker.run_config)
    if samples_per_prompt is not None:
        batch.meta_info["rollout_n"] = samples_per_prompt
    if name == UPDATE and worker.config.actor.records_routing:
        with log.paused(), worker.timeline.paused():
            worker.compute_log_prob(batch)  # an update replays the routing of these very rows
    with log.apart() as calls:
        getattr(worker, name)(batch)
    return tuple(calls)


def _micro_batches(config: PPOTrainerConfig, name: str, size: StepSize) -> tuple[int, int]:
    """(rows of one data-parallel rank in one pass of a training call, rows of a micro-batch)."""
    models, layout = config.actor_rollout_ref, config.training_layout
    actor, scores = models.actor, models.rollout if name == OLD else models.ref
    if name == UPDATE:
        prompts, samples = actor.ppo_mini_batch_size, actor.ppo_micro_batch_size_per_gpu
        tokens = actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else 0
    else:
        prompts, samples = config.data.train_batch_size, scores.log_prob_micro_batch_size_per_gpu
        tokens = scores.log_prob_max_token_len_per_gpu if scores.log_prob_use_dynamic_bsz else 0
    rows = max(1, prompts * models.rollout.n // layout.data_parallel_size)
    if tokens:
        samples = max(1, tokens * layout.context_parallel_size // (size.prompt_length + size.response_length))
    return rows, min(samples or rows, rows)


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

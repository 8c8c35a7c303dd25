"""One rank of a run from its start to the end of a step: bytes by owner and by phase, and every call to other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from megatron.core.memory_ledger import ON_DEVICE, ON_HOST, LedgerEntry, ledger
from megatron.core.parallel_layout import RankCoords
from tools.plan.collectives import Collective, CollectiveLog
from tools.plan.device import MemoryMeter, PlannedDevice
from tools.plan.devices import DeviceProfile
from tools.plan.phase_memory import PhaseMemory
from tools.plan.platform import PLATFORMS
from tools.plan.repeated import RepeatedCalls, exact, repeated_within, steps, what_repeats
from tools.plan.rollout import GenerationPlan, plan_rollout
from tools.plan.training import OLD, REF, UPDATE, Rows, batch_of, training_calls
from tools.plan.worker import PlannedWorker
from tools.plan.world import planned_rank
from verl.trainer.config import PPOTrainerConfig

MANY = 4  # from so many micro-batches on, two small runs are quicker than another large one
KINDS = {"ascend": "npu", "cuda": "cuda", "cpu": "cpu"}  # family of a device -> kind of op table


@dataclass(frozen=True)
class RankPlan:
    """What one rank holds and does in a step.

    num_parameters: the parameters that this rank counts, so that the sum over the stages is the model's · device_state,
    host_state: owner -> bytes while it is there · phases: the step's phases in order; a phase within another comes
    before it · calls: the collectives of each phase · generation: the rollout engine's part.
    """

    rank: int
    coords: RankCoords
    num_parameters: int
    device_state: dict[str, int]
    host_state: dict[str, int]
    phases: tuple[PhaseMemory, ...]
    calls: tuple[RepeatedCalls, ...]
    generation: GenerationPlan
    sync_bytes: dict[str, int]

    @property
    def peak(self) -> PhaseMemory:
        """The phase in which most lies on the device."""
        return max(self.phases, key=lambda phase: phase.peak_bytes)

    @property
    def host_bytes(self) -> int:
        """Host memory of this rank's tensors."""
        return sum(self.host_state.values())


@dataclass(frozen=True)
class StepSize:
    """Rows of a step and their tokens; ``load``: see ``tools.plan.ops.Routing``."""

    prompt_length: int
    response_length: int
    load: float = 1.0


def plan_rank(config: PPOTrainerConfig, device: DeviceProfile, rank: int, size: StepSize) -> RankPlan:
    """Builds ``rank`` and runs its step on a planned device; takes seconds for a stage of 671B parameters.

    ValueError when the run would refuse: what does not divide, or a rollout engine without room for its cache.
    """
    with _worker(config, device, rank, size) as (worker, log):
        worker.timeline.phases.clear()
        rollout = plan_rollout(worker, _rows_of_replica(config), size.prompt_length, size.response_length)
        calls = [exact("weight_sync", rollout.sync.calls), *_generation_calls(rollout.generation)]
        for name in training_calls(config):
            is_update = name == UPDATE
            calls.append(_plan_update(worker, size, log) if is_update else _plan_call(worker, name, size, log))
        with worker.timeline.span("save"):
            worker.onload_training_state()
        return RankPlan(
            rank,
            worker.groups.coords,
            _counted_parameters(worker),
            _device_state(worker, rollout.generation),
            _host_state(worker),
            tuple(worker.timeline.phases),
            tuple(calls),
            rollout.generation,
            {
                "sent": rollout.sync.sent_bytes,
                "received": rollout.sync.received_bytes,
                "kept": rollout.sync.kept_bytes,
                "buckets": rollout.sync.peak_bucket_bytes,
            },
        )


@contextmanager
def _worker(
    config: PPOTrainerConfig, device: DeviceProfile, rank: int, size: StepSize
) -> Iterator[tuple[PlannedWorker, CollectiveLog]]:
    kind = KINDS[device.family]
    log, meter = CollectiveLog(), MemoryMeter()
    planned = PlannedDevice(log, meter, has_host_memory=kind != "cpu")
    platform = PLATFORMS[kind](device.memory_bytes, device.reserved_bytes, planned)
    trainer = config.trainer
    with planned_rank(rank, trainer.world_size, trainer.n_gpus_per_node), planned:
        worker = PlannedWorker(config, kind, size.load, platform)
        with log.phase("init"):
            worker.init_model()
        yield worker, log


def _rows_of_replica(config: PPOTrainerConfig) -> int:
    return config.gen_batch_size * config.actor_rollout_ref.rollout.n // config.rollout_replicas


def _generation_calls(generation: GenerationPlan) -> list[RepeatedCalls]:
    kinds = (("prefill", generation.prefill), ("decode", generation.decode))
    found = [steps(name, step.calls, step.num_steps) for name, step in kinds if step is not None]
    return [*found, exact("generate_end", generation.closing_calls)]


def _plan_call(worker: PlannedWorker, name: str, size: StepSize, log: CollectiveLog) -> RepeatedCalls:
    """A training call with as many micro-batches as its pipeline holds at one time, and what every further one adds.

    The second of two runs has one micro-batch more (with virtual stages, one for each stage), and its additional calls
    are those that every further one adds. In a deep pipeline two small runs show which of the calls these are.
    """
    config = worker.run_config
    rows, per_micro = micro_batches(config, name, size)
    total = -(-rows // per_micro)
    num_stages = worker.groups.layout.pipeline_model_parallel_size
    unit = _unit(worker)
    in_flight = num_stages - worker.groups.coords.pp if name == UPDATE else 1
    few = 2 * num_stages if unit > 1 else in_flight + 1
    if total <= few + unit:
        return exact(name, _run(worker, name, rows, size, log))
    before = _run(worker, name, few * per_micro, size, log)
    num_phases = len(worker.timeline.phases)
    parts = None
    if few > MANY and unit == 1:
        one, two = (_run(worker, name, count * per_micro, size, log) for count in (1, 2))
        parts = repeated_within(before, one, two)
    if parts is None:
        parts = what_repeats(before, _run(worker, name, (few + unit) * per_micro, size, log))
    del worker.timeline.phases[num_phases:]  # these runs need no more memory
    return RepeatedCalls(name, parts, total // unit, few // unit)


def _unit(worker: PlannedWorker) -> int:
    """How many micro-batches a schedule adds at a time."""
    layout = worker.groups.layout
    return layout.pipeline_model_parallel_size if layout.virtual_pipeline_model_parallel_size > 1 else 1


def _plan_update(worker: PlannedWorker, size: StepSize, log: CollectiveLog) -> RepeatedCalls:
    """An update: one mini-batch as ``_plan_call`` plans it, repeated.

    Two more runs, with one and with two of the smallest mini-batches, show what comes before and after all of them.
    """
    config = worker.run_config
    actor = config.actor_rollout_ref.actor
    worker.actor.config = replace(actor, ppo_epochs=1)
    calls = _plan_call(worker, UPDATE, size, log)
    num_mini_batches = -(-config.data.train_batch_size // actor.ppo_mini_batch_size) * actor.ppo_epochs
    if num_mini_batches > 1:
        num_phases = len(worker.timeline.phases)
        most, per_micro = micro_batches(config, UPDATE, size)
        rows, data_parallel = min(per_micro * _unit(worker), most), worker.groups.dp.size()
        worker.actor.config = replace(actor, ppo_epochs=1, ppo_mini_batch_size=rows * data_parallel)
        one, two = (_run(worker, UPDATE, count * rows, size, log, samples_per_prompt=1) for count in (1, 2))
        calls = calls.repeated(num_mini_batches, one, two)
        del worker.timeline.phases[num_phases:]
    worker.actor.config = actor
    return calls


def _run(
    worker: PlannedWorker,
    name: str,
    rows: int,
    size: StepSize,
    log: CollectiveLog,
    *,
    samples_per_prompt: int | None = None,
) -> tuple[Collective, ...]:
    batch = batch_of(Rows(rows, size.prompt_length, size.response_length), worker.run_config)
    if samples_per_prompt is not None:
        batch.meta_info["rollout_n"] = samples_per_prompt
    if name == UPDATE and worker.config.actor.records_routing:
        num_phases = len(worker.timeline.phases)
        with log.paused():
            worker.compute_log_prob(batch)  # an update replays the routing of these very rows
        del worker.timeline.phases[num_phases:]
    with log.apart() as calls:
        getattr(worker, name)(batch)
    return tuple(calls)


def micro_batches(config: PPOTrainerConfig, name: str, size: StepSize) -> tuple[int, int]:
    """(rows of one data-parallel rank in one pass of a training call, rows of a micro-batch)."""
    actor, rollout, ref = (getattr(config.actor_rollout_ref, part) for part in ("actor", "rollout", "ref"))
    layout = config.training_layout
    prompts = actor.ppo_mini_batch_size if name == UPDATE else config.data.train_batch_size
    rows = max(1, prompts * rollout.n // layout.data_parallel_size)
    of_log_probs = {OLD: rollout, REF: ref}.get(name)
    if of_log_probs is None:
        by_tokens, samples, tokens = (
            actor.use_dynamic_bsz,
            actor.ppo_micro_batch_size_per_gpu,
            actor.ppo_max_token_len_per_gpu,
        )
    else:
        by_tokens, samples, tokens = (
            of_log_probs.log_prob_use_dynamic_bsz,
            of_log_probs.log_prob_micro_batch_size_per_gpu,
            of_log_probs.log_prob_max_token_len_per_gpu,
        )
    if by_tokens:
        samples = max(1, tokens * layout.context_parallel_size // (size.prompt_length + size.response_length))
    return rows, min(samples or rows, rows)


def _counted_parameters(worker: PlannedWorker) -> int:
    """Elements of the checkpoint's tensors on this rank's stage, each counted once over all ranks of the stage."""
    layout = worker.groups.layout
    total = 0
    module = worker.actor_module.module
    total += sum(buffer.numel() for name, buffer in module.named_buffers() if name.endswith("router.expert_bias"))
    for name, param in module.named_parameters():
        if getattr(param, "shared", False) or ".mtp." in f".{name}":
            continue
        if not getattr(param, "allreduce", True):
            parts = layout.expert_model_parallel_size * layout.expert_tensor_parallel_size
        else:
            parts = layout.tensor_model_parallel_size if getattr(param, "tensor_model_parallel", False) else 1
        total += param.numel() * parts
    return total


def _device_state(worker: PlannedWorker, generation: GenerationPlan) -> dict[str, int]:
    worker.actor_module.onload_params()
    worker.actor_module.onload_grads()
    worker.optimizer.onload()
    state = _by_kind(ledger(worker.actor_module, worker.optimizer), ON_DEVICE)
    if worker.ref is not None:
        state["reference"] = worker.ref_weights.host_bytes
    return state | {f"rollout {owner}": num_bytes for owner, num_bytes in generation.state_bytes.items()}


def _host_state(worker: PlannedWorker) -> dict[str, int]:
    state = _by_kind(ledger(worker.actor_module, worker.optimizer), ON_HOST)
    if worker.ref is not None:
        state["reference"] = worker.ref_weights.host_bytes
    return state


def _by_kind(entries: Sequence[LedgerEntry], place: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in entries:
        if entry.device == place:
            found[entry.what] = found.get(entry.what, 0) + entry.num_bytes
    return found

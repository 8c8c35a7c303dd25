"""Generation of one rank: the memory on its device, what a step adds, and its collectives.

The worker's own engine does it: its weights and its cache are built, and the largest step of each kind is run once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tools.plan.collectives import Collective
from tools.plan.generation_steps import Step, Workload, count_steps
from tools.plan.phase_memory import PhaseMemory
from tools.plan.rollout_ops import ordinary_token
from tools.plan.sync import SyncPlan, plan_weight_sync
from tools.plan.worker import PlannedWorker
from verl.workers.rollout.vllm_rollout.vllm_rollout_spmd import vLLMRollout
from vllm import LLM
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request


@dataclass(frozen=True)
class StepCost:
    """The largest step of a kind.

    num_steps: the number of steps of the kind in the whole generation · num_tokens, num_sequences, num_context: the
    sizes of this step, see `generation_steps` · peak_bytes: its memory beyond what lies on the device between steps ·
    calls: its collectives, in order; other steps of the kind make the same ones with fewer tokens.
    """

    num_steps: int
    num_tokens: int
    num_sequences: int
    num_context: int
    peak_bytes: int
    calls: tuple[Collective, ...]


@dataclass(frozen=True)
class GenerationPlan:
    """One rank's generation.

    state_bytes: owner -> what lies on the device all the time: ``weights``, ``kv_cache``, ``tables`` (positions, noise
    keys, inputs of graphs), ``graphs`` · num_blocks, block_size: of the KV cache · num_sequences_fit: the
    sequences of full length that the cache holds · num_computed: tokens of all steps · num_preemptions: sequences that
    were computed again for lack of blocks · prefill, decode: None when there are no such steps · closing_calls: the
    collectives after the last step.
    """

    state_bytes: dict[str, int]
    num_blocks: int
    block_size: int
    num_sequences_fit: int
    num_computed: int
    num_preemptions: int
    prefill: StepCost | None
    decode: StepCost | None
    closing_calls: tuple[Collective, ...]


@dataclass(frozen=True)
class RolloutPlan:
    """A rollout from the training weights on the device to the last row: its phases, ordered by their ends.

    ``decode`` and ``prefill`` are the largest step of each kind; the other phases are those of the worker.
    """

    sync: SyncPlan
    generation: GenerationPlan
    phases: tuple[PhaseMemory, ...]


def plan_rollout(worker: PlannedWorker, num_prompts: int, prompt_length: int, response_length: int) -> RolloutPlan:
    """What the worker's ``generate_sequences`` does, with arguments as `plan_generation`'s."""
    first = len(worker.timeline.phases)
    sync = plan_weight_sync(worker)
    worker.sync_samples_only()
    worker.offload_for_rollout()
    with worker.sharding_manager:
        generation = plan_generation(worker, num_prompts, prompt_length, response_length)
    return RolloutPlan(sync, generation, tuple(worker.timeline.phases[first:]))


def plan_generation(
    worker: PlannedWorker, num_prompts: int, prompt_length: int, response_length: int
) -> GenerationPlan:
    """The generation of an engine whose weights and cache are awake.

    Args:
        num_prompts: rows of the rank's replica, ``rollout.n`` of each prompt together as the trainer repeats them.
        prompt_length, response_length: tokens of every row.
    """
    config, llm = worker.config.rollout, _rollout(worker).inference_engine
    token = ordinary_token(worker.config.model.path)
    engine = llm.config
    load = Workload(
        num_prompts,
        config.n,
        prompt_length,
        response_length,
        llm.core.worker.num_gpu_blocks,
        engine.cache.block_size,
        engine.cache.enable_prefix_caching,
        engine.scheduler,
        token,
    )
    steps = count_steps(load)
    meter = worker.platform.planned.meter
    before = meter.now_bytes
    # The first decode step captures the graphs, which stay in memory from then on.
    decode = _run(worker, "decode", load, steps.decode, steps.num_decode)
    graph_bytes = 0 if engine.compilation.enforce_eager else meter.now_bytes - before
    prefill = _run(worker, "prefill", load, steps.prefill, steps.num_prefill)
    report = llm.get_memory_report()
    state = {"weights": report["weights_bytes"], "kv_cache": report["kv_cache_bytes"]}
    return GenerationPlan(
        state_bytes=state | {"tables": _table_bytes(llm), "graphs": graph_bytes},
        num_blocks=load.num_blocks,
        block_size=load.block_size,
        num_sequences_fit=load.num_blocks // -(-(prompt_length + response_length) // load.block_size),
        num_computed=steps.num_computed,
        num_preemptions=steps.num_preemptions,
        prefill=prefill,
        decode=decode,
        closing_calls=_closing(worker),
    )


def _rollout(worker: PlannedWorker) -> vLLMRollout:
    assert isinstance(worker.rollout, vLLMRollout), type(worker.rollout)
    return worker.rollout


def _run(worker: PlannedWorker, name: str, load: Workload, step: Step | None, num_steps: int) -> StepCost | None:
    """Run the step through the real model runner, as a phase."""
    if step is None:
        return None
    core, planned = _rollout(worker).inference_engine.core, worker.platform.planned
    requests = [_request(worker, load, row.row) for row in step.rows]
    for request, row in zip(requests, step.rows, strict=True):
        request.token_ids += [load.token] * (row.num_tokens - load.prompt_length)
        request.num_computed_tokens = row.num_computed
        request.block_ids = list(row.block_ids)
    scheduled = SchedulerOutput(
        requests,
        [row.num_new for row in step.rows],
        [None] * len(requests),
        removed=[],
        total_num_tokens=step.num_tokens,
        block_copies=list(step.block_copies),
    )
    before = planned.meter.now_bytes
    with planned.log.apart() as calls, worker.timeline.span(name):
        exchange = core.parallel.exchange_step(step.num_tokens, True, scheduled.is_decode_only, core.device)
        core.worker.execute(scheduled, exchange)
    peak = worker.timeline.phases[-1].peak_bytes - before
    core.worker.runner.batch.update(SchedulerOutput([], [], [], removed=requests, total_num_tokens=0))
    return StepCost(num_steps, step.num_tokens, len(requests), step.num_context, peak, tuple(calls))


def _request(worker: PlannedWorker, load: Workload, row: int) -> Request:
    """A request with the sampling parameters of training."""
    rollout = _rollout(worker)
    params = rollout.sampling_params({"eos_token_id": -1}, row, load.response_length)
    processor = rollout.inference_engine.engine.processor
    group = processor.group(f"row {row}", str(row), {"prompt_token_ids": load.prompt(row)}, params)
    processor.add_samples(group, 0)
    return group.samples[0]


def _closing(worker: PlannedWorker) -> tuple[Collective, ...]:
    """The collectives of one more exchange, in which replicas that step together learn that no work is left."""
    core = _rollout(worker).inference_engine.core
    with worker.platform.planned.log.apart() as calls:
        core.parallel.exchange_step(0, False, True, core.device)
    return tuple(calls)


def _table_bytes(llm: LLM) -> int:
    worker = llm.core.worker
    rotary = worker.model.rotary
    tensors = [rotary.cos, rotary.sin, worker.runner.sampler.vocab_keys_W]
    if worker.graphs is not None:
        tensors += worker.graphs.input_buffers
    return _num_bytes(tensors)


def _num_bytes(tensors: Iterable) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

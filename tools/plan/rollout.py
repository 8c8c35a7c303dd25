"""Weight sync and generation of one rank: the memory on its device, what a step adds, and its collectives.

The worker's own engine does it: its weights and its cache are built, and the largest step of each kind is run once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from tools.plan.collectives import Collective
from tools.plan.generation_steps import Step, Workload, count_steps
from tools.plan.rollout_ops import ordinary_token
from tools.plan.sync import planned_sync
from tools.plan.timing.drafts import tokens_per_step
from tools.plan.worker import PlannedRolloutWorker, PlannedWorker
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request


@dataclass(frozen=True)
class StepCost:
    """The largest step of a kind.

    num_steps: the number of steps of the kind in the whole generation, expected where there are drafts · num_tokens:
    the new tokens of this step · peak_bytes: its memory beyond what lies on the device between steps · calls: its
    collectives, in order; other steps of the kind make the same ones with fewer tokens · launches: what the host queues
    in this step; a graph is one, and the attention of each of its layers one more, whose lengths are renewed.
    """

    num_steps: int
    num_tokens: int
    peak_bytes: int
    calls: tuple[Collective, ...]
    launches: int


@dataclass(frozen=True)
class RolloutPlan:
    """One rank's rollout, from the training weights on the device to the last row.

    sync_bytes, sync_calls: see ``planned_sync`` · state_bytes: owner -> what lies on the device all the time:
    ``weights``, ``kv_cache``, ``tables`` (positions, noise keys, inputs of graphs), ``graphs`` · num_blocks: of the KV
    cache · prefill, decode: None when there are no such steps · closing_calls: the collectives after the last step.
    """

    sync_bytes: dict[str, int]
    sync_calls: tuple[Collective, ...]
    state_bytes: dict[str, int]
    num_blocks: int
    prefill: StepCost | None
    decode: StepCost | None
    closing_calls: tuple[Collective, ...]


def plan_rollout(
    worker: PlannedWorker | PlannedRolloutWorker,
    num_rows: int,
    prompt_length: int,
    response_length: int,
    acceptance: Sequence[float] = (),
) -> RolloutPlan:
    """A weight sync and the generation after it; ``decode`` and ``prefill`` are phases of the worker's timeline too.

    Args:
        num_rows: rows of the rank's replica, ``rollout.n`` of each prompt together as the trainer repeats them.
        prompt_length, response_length: tokens of every row.
        acceptance: see ``StepSize``.
    """
    sync_bytes, sync_calls = planned_sync(worker.sync)
    with worker.generating():
        llm, planned = worker.rollout.inference_engine, worker.platform.planned
        core, engine = llm.core, llm.config
        load = Workload(
            num_rows,
            worker.config.rollout.n,
            prompt_length,
            response_length,
            core.worker.cache.num_blocks,
            engine.cache.block_size,
            engine.cache.enable_prefix_caching,
            engine.scheduler,
            ordinary_token(worker.hf_config),
        )
        steps = count_steps(load)
        widest, num_decode = steps.decode, steps.num_decode
        if engine.speculative is not None and widest is not None:
            count = engine.speculative.num_speculative_tokens
            num_decode = ceil(num_decode / tokens_per_step(acceptance, count)) if acceptance else num_decode
            widest = widest.with_drafts(min(count, response_length - 1), engine.scheduler.max_num_batched_tokens)
        before = planned.meter.now_bytes
        # The first decode step captures the graphs, which stay in memory from then on.
        decode = _run(worker, "decode", load, widest, num_decode)
        graph_bytes = 0 if engine.compilation.enforce_eager else planned.meter.now_bytes - before
        with worker.timeline.paused():
            again = _run(worker, "decode", load, widest, num_decode)  # without a capture
        if decode is not None and again is not None:
            renewed = 0 if engine.compilation.enforce_eager else engine.model.hf.num_hidden_layers
            decode = replace(decode, launches=again.launches + renewed)
        prefill = _run(worker, "prefill", load, steps.prefill, steps.num_prefill)
        with planned.log.apart() as closing:  # replicas that step together learn that no work is left
            core.parallel.exchange_step(0, False, True, core.device)
        report = llm.get_memory_report()
        tables = [core.worker.model.rotary.cos, core.worker.model.rotary.sin, core.worker.runner.sampler.vocab_keys_W]
        tables += [buffer for graphs in core.worker.all_graphs for buffer in graphs.input_buffers]
        state_bytes = {
            "weights": report["weights_bytes"],
            "kv_cache": report["kv_cache_bytes"],
            "tables": sum(tensor.untyped_storage().nbytes() for tensor in tables),
            "graphs": graph_bytes,
        }
    return RolloutPlan(sync_bytes, sync_calls, state_bytes, load.num_blocks, prefill, decode, tuple(closing))


def _run(
    worker: PlannedWorker | PlannedRolloutWorker, name: str, load: Workload, step: Step | None, num_steps: int
) -> StepCost | None:
    """Run the step through the real model runner, as a phase."""
    if step is None:
        return None
    core, planned = worker.rollout.inference_engine.core, worker.platform.planned
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
        drafts={str(row.row): [load.token] * row.num_drafts for row in step.rows if row.num_drafts},
        block_copies=list(step.block_copies),
    )
    speculation = core.scheduler.speculation
    num_passes = 0 if speculation is None else speculation.num_passes(len(requests))
    before = planned.meter.now_bytes
    launches_before = planned.launches
    with planned.log.apart() as calls, worker.timeline.span(name):
        facts = step.num_tokens, True, scheduled.is_decode_only
        exchange = core.parallel.exchange_step(*facts, core.device, num_passes, len(scheduled.sampled))
        core.worker.execute(scheduled, exchange)
    peak = worker.timeline.phases[-1].peak_bytes - before
    launches = planned.launches - launches_before
    core.worker.runner.batch.update(SchedulerOutput([], [], [], removed=requests, total_num_tokens=0))
    return StepCost(num_steps, step.num_tokens, peak, tuple(calls), launches)


def _request(worker: PlannedWorker | PlannedRolloutWorker, load: Workload, row: int) -> Request:
    """A request with the sampling parameters of training."""
    return worker.rollout.request(str(row), load.prompt(row), row, load.response_length, {"eos_token_id": -1})

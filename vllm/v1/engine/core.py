"""The engine's step: schedule, run the model, append the samples."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from torch.profiler import record_function

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.non_finite import NonFiniteLogitsError, failed_requests, model_problem, settings_problem
from vllm.v1.request import Request, TopLogprobs
from vllm.v1.sample.sampler import SamplerOutput
from vllm.v1.spec_decode.drafter import Speculation
from vllm.v1.spec_decode.step_costs import measure_step_costs
from vllm.v1.worker.cache_memory import zero_blocks
from vllm.v1.worker.rank_context import RankContext
from vllm.v1.worker.worker import Worker

logger = logging.getLogger(__name__)


class EngineCore:
    """Scheduler and worker of one rank."""

    def __init__(self, rank: RankContext) -> None:
        config, self.parallel, self.platform = rank.config, rank.parallel, rank.platform
        self.device = rank.platform.exchange_device(rank.device)
        self._rank, self.worker = rank, Worker(rank)
        kv = KVCacheManager(self.worker.cache.num_blocks, config.cache.block_size, config.cache.enable_prefix_caching)
        speculation = None if config.speculative is None else Speculation(config.speculative)
        self.scheduler = Scheduler(config.scheduler, kv, speculation)
        self.num_steps = 0
        self.expects_requests = False  # some will be queued, such as next turns of finished ones: there is work left
        self.is_idle = False  # the last step had nothing to compute, here and in the replicas that step with this one
        self.model_problem: str | None = None  # why its logits are not finite, until the weights change

    @property
    def policy_version(self) -> int:
        """The version of the weights; a token has that of its step."""
        return self.scheduler.policy_version

    @property
    def has_work(self) -> bool:
        """Whether requests are unfinished here, or expected."""
        return self.scheduler.has_unfinished or self.expects_requests

    def step(self) -> tuple[list[Request], bool]:
        """Run one step; returns (finished requests, whether any replica that shares experts with this one has, or had
        before this step, work left).

        In lock-step every replica calls it until the flag is False everywhere: a replica without work still computes
        its experts.
        """
        speculation = self.scheduler.speculation
        if speculation is not None and speculation.needs_costs:
            speculation.costs = measure_step_costs(self._rank, self.worker, self._seconds_of_step)
        step = self.scheduler.schedule()
        counts_samples = self.parallel.config.steps_in_lockstep or step.num_draft_passes
        drafting = (step.num_draft_passes, len(step.sampled)) if speculation is not None and counts_samples else ()
        facts = step.total_num_tokens, self.has_work, step.is_decode_only
        exchange = self.parallel.exchange_step(*facts, self.device, *drafting)
        self.is_idle = not any(exchange.token_counts)
        if self.is_idle:
            self.worker.batch.update(step)  # the rows of requests that have left are free
            return [], exchange.is_anyone_busy
        with record_function("decode" if step.is_decode_only else "prefill"):
            output = self.worker.execute(step, exchange)
            token_ids = output.token_ids.tolist()
        self.num_steps += 1
        problems = {} if output.is_whole else self._problems(step, output)
        if output.top is not None:
            self._record_top(step, output.top, problems)
        finished = self.scheduler.update_from_output(step, token_ids, output.logprobs, problems)
        if speculation is not None:
            speculation.num_elsewhere = max(exchange.sampled_counts) if len(exchange.sampled_counts) > 1 else 0
            if output.drafts:
                speculation.note_predictions(step.requests, output.drafts)
        if self.worker.keeps_routed_experts:
            for request in finished:  # their blocks are free, but hold what they held until the next step
                request.routed_experts = self.worker.routed_experts(request)
        if step.drafts:
            for request in finished:
                del request.output_top[request.num_output_tokens :]  # of accepted drafts behind its end
        if problems:
            self._clean_free_blocks()
        return finished, True

    def _seconds_of_step(self, scheduler: Scheduler) -> float:
        """The time of the next step of another scheduler's requests."""
        own, num_steps, start_s = self.scheduler, self.num_steps, time.perf_counter()
        self.scheduler = scheduler
        try:
            self.step()
        finally:
            self.scheduler, self.num_steps = own, num_steps
        return time.perf_counter() - start_s

    def require_finite(self) -> None:
        """NonFiniteLogitsError when a step's logits were not finite; the requests should be dropped then."""
        if self.model_problem is not None:
            raise NonFiniteLogitsError(self.model_problem)

    def drop_requests(self) -> None:
        """Drop all requests of a step that failed."""
        self.scheduler.abort_all()
        self._forget_problem()

    def _problems(self, step: SchedulerOutput, output: SamplerOutput) -> dict[str, str]:
        """Return what is wrong with the step's samples, by request."""
        by_model, by_settings = failed_requests(step, output)
        problems = {request.request_id: settings_problem(request) for request in by_settings}
        if by_model:
            self.model_problem = model_problem(by_model, self.worker)
            problems |= {request.request_id: self.model_problem for request in by_model}
        for problem in dict.fromkeys(problems.values()):
            logger.error("%s", problem)
        return problems

    def _clean_free_blocks(self) -> None:
        """Let no sequence find what failed requests have left in the cache."""
        pool = self.scheduler.kv.pool
        self.scheduler.kv.reset_prefix_cache()
        zero_blocks(self.worker.cache.caches, [block for block in range(pool.num_blocks) if not pool.ref_count(block)])

    def _forget_problem(self) -> None:
        if self.model_problem is not None and self.worker.cache.is_allocated:
            self._clean_free_blocks()
        self.model_problem = None

    def idle_worker(self, action: str) -> Worker:
        """The worker, to change its weights or memory by `action`: cached prefixes are forgotten.

        RuntimeError while requests run.
        """
        if self.scheduler.has_unfinished:
            raise RuntimeError(f"{action} while requests are running: finish generate first")
        self.scheduler.kv.reset_prefix_cache()
        self.worker.batch.has_gaps = False
        self._forget_problem()
        return self.worker

    def set_policy_version(self, version: int | None) -> None:
        """All weights are those of this policy version (None: the next one)."""
        self.scheduler.set_policy_version(self.policy_version + 1 if version is None else version)

    def require_ready(self) -> None:
        """RuntimeError when the engine cannot generate, saying what to call."""
        weights, cache = self.worker.weights, self.worker.cache
        asleep = [tag for tag, memory in (("weights", weights), ("kv_cache", cache)) if not memory.is_allocated]
        if asleep:
            raise RuntimeError(f"generate while the engine sleeps: call wake_up(tags={asleep}) first")
        if weights.names_to_load:
            raise RuntimeError(
                f"generate with {len(weights.names_to_load)} weights never loaded after a level-2 sleep or a failed "
                f"update, e.g. {min(weights.names_to_load)}: call load_weights or update_weights first"
            )

    @staticmethod
    def _record_top(step: SchedulerOutput, top: list[TopLogprobs], problems: Mapping[str, str]) -> None:
        for request, (rank, ids, logprobs) in zip(step.request_of_sample, top, strict=True):
            count = request.num_top_logprobs  # 0: they are its neighbours', which may end before it
            if count and request.request_id not in problems:
                request.output_top.append((rank, ids[:count], logprobs[:count]))

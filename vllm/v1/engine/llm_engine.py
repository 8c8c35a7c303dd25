"""Prompts in, outputs out: checks requests, fans n samples out, runs the core until all are done."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.output_processor import PromptGroup
from vllm.v1.engine.rebalancer import RebalanceConfig, Rebalancer
from vllm.v1.request import Request
from vllm.v1.sample.rng import derive_seed


class LLMEngine:
    """The requests of one process."""

    def __init__(self, config: VllmConfig, core: EngineCore) -> None:
        self.config, self.core = config, core
        padded_sizes = () if config.compilation.enforce_eager else config.compilation.cudagraph_capture_sizes
        rebalance = RebalanceConfig(config.parallel.rebalance_steps, padded_sizes)
        self.rebalancer = Rebalancer(
            rebalance, core.scheduler, core.parallel, core.device, lambda: core.worker.kv_caches
        )
        self._num_prompts = 0  # over the engine's life: names requests, and seeds those without a seed

    def generate(self, groups: list[PromptGroup]) -> None:
        """Run every group's samples to their end; fills `samples`.

        ValueError, before anything runs, lists every bad prompt.
        """
        self.core.require_ready()
        problems = [p for index, group in enumerate(groups) for p in self._problems(index, group)]
        if problems:
            raise ValueError("prompts cannot be run:\n" + "\n".join(f"  - {p}" for p in problems))
        for group in groups:
            self._add(group)
        try:
            self._run_to_the_end()
            self.rebalancer.bring_home()
        except BaseException:
            self.core.scheduler.abort_all()
            self.rebalancer.forget()
            raise

    def _run_to_the_end(self) -> None:
        """Step until no request is left: of this replica, or of all that it steps or rebalances with.

        In lock-step a replica consumes its own requests, then empty steps; it leaves with all others at the first
        exchange in which nobody has work. Else one that rebalances and has no work waits for the others' next round.
        """
        core, scheduler, parallel = self.core, self.core.scheduler, self.config.parallel
        interval, num_steps, is_anyone_busy = self.rebalancer.config.interval, 0, True
        while is_anyone_busy:
            if parallel.steps_in_lockstep:
                _, is_anyone_busy = core.step()
            elif scheduler.has_unfinished:
                core.step()
                is_anyone_busy = scheduler.has_unfinished
            else:
                is_anyone_busy = False
            num_steps += 1
            # NPU-ADAPTATION(rollout-rebalance): a step takes as long as the fullest replica's, whose batch size the
            # graphs and the expert exchange are padded to; drop when prompts are handed to replicas one by one as
            # they become free.
            if interval and (num_steps >= interval or not (is_anyone_busy or parallel.steps_in_lockstep)):
                is_anyone_busy, num_steps = self.rebalancer.balance(), 0

    def _problems(self, index: int, group: PromptGroup) -> list[str]:
        tokens, limit = group.prompt_token_ids, self.config.model.max_model_len - 1
        vocab_size = self.config.model.hf.vocab_size
        if not tokens:
            return [f"prompt {index} is empty"]
        problems = []
        if len(tokens) > limit:
            problems.append(
                f"prompt {index} has {len(tokens)} tokens, the limit is {limit} (max_model_len={limit + 1} less one "
                "new token); shorten it or raise max_model_len"
            )
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            outside = next(t for t in tokens if not 0 <= t < vocab_size)
            problems.append(f"prompt {index} holds token id {outside}, outside of the vocabulary of {vocab_size}")
        problems += [
            f"prompt {index}: stop_token_ids holds {t}, outside of the vocabulary of {vocab_size}"
            for t in group.params.stop_token_ids
            if not 0 <= t < vocab_size
        ]
        return problems

    def _add(self, group: PromptGroup) -> None:
        params = group.params
        room = self.config.model.max_model_len - len(group.prompt_token_ids)
        seed = params.seed
        if seed is None:
            seed = derive_seed(self.config.model.seed, self.config.parallel.replica, self._num_prompts)
        group.request_id = str(self._num_prompts)
        self._num_prompts += 1
        stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(group.eos_token_ids)
        )
        for index in range(params.n):
            request = Request(
                f"{group.request_id}_{index}",
                group.prompt_token_ids,
                max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                min_tokens=params.min_tokens,
                seed=seed % 2**64 if index == 0 else derive_seed(seed, index),
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                stop_ids=stop_ids,
                num_top_logprobs=params.logprobs or 0,
            )
            group.samples.append(request)
            self.core.scheduler.add_request(request)

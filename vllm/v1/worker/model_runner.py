"""Runs the model on a scheduled step: host arrays to device tensors, forward, logits, samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.distributed.parallel_state import StepExchange
from vllm.forward_context import ForwardContext
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.ops.contract import DecodeMetadata, KVCache, PrefillMetadata, RolloutOps
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.sample.prompt_logprobs import score_prompts
from vllm.v1.sample.sampler import Sampler, SamplerOutput
from vllm.v1.worker.decode_graphs import DecodeGraphs
from vllm.v1.worker.input_batch import InputBatch
from vllm.v1.worker.step_plan import StepPlan, plan_step

LogitsOf = Callable[[Tensor], Tensor]


class ModelRunner:
    """Owns the rows of the running requests; the model, the caches, the graphs and the ops are the worker's."""

    def __init__(
        self,
        config: VllmConfig,
        model: CausalLM,
        ops: RolloutOps,
        graphs: DecodeGraphs | None,
        device: torch.device,
    ) -> None:
        self.model, self.graphs, self.device = model, graphs, device
        self.block_size = config.cache.block_size
        self.batch = InputBatch(config.scheduler.max_num_seqs, config.model.max_model_len, self.block_size)
        self._may_keep_few = model.keeps_few and not config.parallel.steps_in_lockstep  # there others count on all rows
        self.sampler = Sampler(config.model.hf.vocab_size, ops, device, config.logprobs_mode)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput, exchange: StepExchange, caches: list[KVCache]) -> SamplerOutput:
        """Run one step; its samples, in the step's order, of the requests with no uncomputed token left."""
        rows = self.batch.update(step)
        plan = plan_step(self.batch, rows, np.array(step.num_tokens, dtype=np.int64))
        states_T, logits_of = self._forward(plan, exchange, caches)
        prompt_scores = []
        if self.batch.prompts_to_score:
            prompt_scores = score_prompts(states_T, plan, self.batch.prompts_to_score, logits_of)
        if len(plan.sampled_rows) == 0:
            return SamplerOutput(np.empty(0, dtype=np.int64), [], None, prompt_scores)
        if plan.sampled_T is not None and len(states_T) > len(plan.sampled_T):
            states_T = states_T.index_select(0, self._send(plan.sampled_T))
        output = self.sampler(logits_of(states_T), self.batch, plan.sampled_rows)
        self.batch.append_tokens(plan.sampled_rows, output.token_ids)
        output.prompt_scores = prompt_scores
        return output

    def _forward(self, plan: StepPlan, exchange: StepExchange, caches: list[KVCache]) -> tuple[Tensor, LogitsOf]:
        """(a row of each token, or of the tokens to sample after, and what makes logits of rows); by a graph when every
        replica decodes and a graph is large enough for all.
        """
        if self.graphs is not None and exchange.is_decode_everywhere:
            size = self.graphs.size_for(max(exchange.token_counts))
            if size is not None:
                states_B = self.graphs.run(plan, self.batch.block_table[plan.rows_B], size, caches)
                return states_B, _as_they_are if self.graphs.makes_logits(size) else self.model.compute_logits
        context = self._context(plan, exchange.token_counts)
        keeps_choices = len(caches) > len(self.model.layers)
        if self._may_keep_few and context.prefill is not None and not (self.batch.prompts_to_score or keeps_choices):
            context.last_layer = self._sampled_alone(plan, context)
        return self.model(self._send(plan.token_ids_T), caches, context), self.model.compute_logits

    def _sampled_alone(self, plan: StepPlan, context: ForwardContext) -> ForwardContext | None:
        """The last layer's context: the tokens to sample after as a decode step. None when there are none."""
        if plan.sampled_T is None or len(plan.sampled_T) == 0:
            return None
        rows, count = plan.sampled_rows, len(plan.sampled_rows)
        return replace(
            context,
            num_tokens=count,
            num_decode_tokens=count,
            decode=self._decode(rows, self.batch.num_tokens[rows]),
            prefill=None,
            dp_token_counts=[count],
            kept_B=self._send(plan.sampled_T),
        )

    def _context(self, plan: StepPlan, dp_token_counts: list[int]) -> ForwardContext:
        return ForwardContext(
            num_tokens=len(plan.token_ids_T),
            num_decode_tokens=plan.num_decode,
            positions_T=self._send(plan.positions_T),
            slots_T=self._send(plan.slots_T),
            decode=self._decode(plan.rows_B[: plan.num_decode], plan.seq_lens_B[: plan.num_decode]),
            prefill=self._prefill(plan),
            dp_token_counts=dp_token_counts,
        )

    def _decode(self, rows: np.ndarray, seq_lens: np.ndarray) -> DecodeMetadata | None:
        if len(rows) == 0:
            return None
        return DecodeMetadata(
            seq_lens, self._send(seq_lens.astype(np.int32)), self._tables(rows, seq_lens), self.block_size
        )

    def _prefill(self, plan: StepPlan) -> PrefillMetadata | None:
        if plan.num_decode == len(plan.rows_B):
            return None
        prefilling = slice(plan.num_decode, None)
        rows, seq_lens, query_lens = plan.rows_B[prefilling], plan.seq_lens_B[prefilling], plan.query_lens_B[prefilling]
        cu_query_lens = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
        return PrefillMetadata(
            query_lens,
            seq_lens,
            self._send(cu_query_lens),
            self._send(seq_lens.astype(np.int32)),
            self._tables(rows, seq_lens),
            self.block_size,
        )

    def _tables(self, rows: np.ndarray, seq_lens: np.ndarray) -> Tensor:
        width = -(-int(seq_lens.max()) // self.block_size)
        return self._send(self.batch.block_table[rows, :width])

    def _send(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)


def _as_they_are(rows: Tensor) -> Tensor:
    return rows

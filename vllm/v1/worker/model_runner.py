"""Runs the model on a scheduled step: host arrays to device tensors, forward, logits, samples.

Letters: T tokens of a step, B sequences.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vllm.distributed.parallel_state import StepExchange
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.ops.contract import KVCache
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request
from vllm.v1.sample.sampler import Sampler, SamplerOutput, score_prompts
from vllm.v1.spec_decode.mtp_proposer import MtpProposer
from vllm.v1.spec_decode.verification import accepted
from vllm.v1.worker.decode_graphs import DecodeGraphs
from vllm.v1.worker.input_batch import InputBatch, StepInputs, prepare_step
from vllm.v1.worker.rank_context import RankContext
from vllm.v1.worker.step_context import ContextBuilder

LogitsOf = Callable[[Tensor], Tensor]


class ModelRunner:
    """Runs steps on the rows of the running requests; the worker owns the model, the caches, the graphs and the ops."""

    def __init__(
        self,
        rank: RankContext,
        model: CausalLM,
        batch: InputBatch,
        graphs: DecodeGraphs | None,
        proposer: MtpProposer | None,
    ) -> None:
        config = rank.config
        self.model, self.batch, self.graphs, self._proposer = model, batch, graphs, proposer
        self._contexts = ContextBuilder(batch, rank.device)
        # In lock-step other replicas use all rows.
        self._may_prune = model.prunes_last_layer and not config.parallel.steps_in_lockstep
        self.sampler = Sampler(config.model.hf.vocab_size, rank.ops, rank.device, config.logprobs_mode)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput, exchange: StepExchange, caches: list[KVCache]) -> SamplerOutput:
        """Run one step; return samples, in the step's order, of the requests whose tokens are all computed now."""
        rows = self.batch.update(step)
        num_drafts, computed = self.batch.write_drafts(step), self.batch.num_computed[rows]
        inputs = prepare_step(self.batch, rows, np.array(step.num_tokens, dtype=np.int64), num_drafts)
        states_T, scored_T, logits_of = self._forward(inputs, exchange, caches)
        unscored: list[Request] = []
        if self.batch.prompts_to_score:
            unscored = score_prompts(scored_T, inputs, self.batch.prompts_to_score, logits_of)
        output = SamplerOutput(np.empty(0, dtype=np.int64), [], None)
        if len(inputs.sampled_rows) > 0:
            output = self._sample(step, inputs, scored_T, logits_of, num_drafts is not None)
        output.unscored = unscored
        if self._proposer is not None:
            output.drafts = self._proposer.propose(step, inputs, rows, computed, states_T, exchange, caches)
        return output

    def _sample(
        self, step: SchedulerOutput, inputs: StepInputs, scored_T: Tensor, logits_of: LogitsOf, has_drafts: bool
    ) -> SamplerOutput:
        """Draw the step's tokens, keep the right ones of those behind drafts, and append them to their rows."""
        if inputs.sampled_T is not None and len(scored_T) > len(inputs.sampled_T):
            scored_T = scored_T.index_select(0, self._contexts.send(inputs.sampled_T))
        lens = inputs.sampled_lens if has_drafts else None
        output = self.sampler(logits_of(scored_T), self.batch, inputs.sampled_rows, lens)
        if not has_drafts:
            self.batch.append_tokens(inputs.sampled_rows, output.token_ids)
            return output
        output, counts = accepted(step, output)
        sampled = [self.batch.row_of[request.request_id] for request in step.sampled]
        self.batch.append_tokens(np.array(sampled), output.token_ids, counts)
        return output

    def _forward(
        self, inputs: StepInputs, exchange: StepExchange, caches: list[KVCache]
    ) -> tuple[Tensor, Tensor, LogitsOf]:
        """Return the states of all tokens, or of those to sample after, and rows with the function that turns these
        into logits: the states, or what is the logits already.

        A graph runs the step when every replica decodes and a graph is large enough for all.
        """
        if self.graphs is not None and exchange.is_decode_everywhere:
            size = self.graphs.size_for(max(exchange.token_counts))
            if size is not None:
                rows_B = self.graphs.run(inputs, self.batch.tables(inputs, slice(None)), size, caches)
                assert self.graphs.states_BH is not None
                logits_of = _as_they_are if self.graphs.makes_logits(size) else self.model.compute_logits
                return self.graphs.states_BH, rows_B, logits_of
        context = self._contexts.context(inputs, exchange.token_counts)
        keeps_choices = len(caches) > self.model.num_caches
        needs_all = self.batch.prompts_to_score or keeps_choices or exchange.num_draft_passes
        if self._may_prune and context.prefill is not None and not needs_all:
            context.last_layer = self._contexts.sampled_alone(inputs, context)
        states_T = self.model(self._contexts.send(inputs.token_ids_T), caches, context)
        return states_T, states_T, self.model.compute_logits


def _as_they_are(rows: Tensor) -> Tensor:
    return rows

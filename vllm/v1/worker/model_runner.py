"""Runs the model on a scheduled step: host arrays to device tensors, forward, logits, samples.

Letters: T tokens of a step, B sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from vllm.distributed.parallel_state import StepExchange
from vllm.forward_context import ForwardContext
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.ops.contract import DecodeMetadata, KVCache, PrefillMetadata
from vllm.utils import async_tensor_h2d
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request
from vllm.v1.sample.sampler import Sampler, SamplerOutput, score_prompts
from vllm.v1.spec_decode.verification import accepted
from vllm.v1.worker.decode_graphs import DecodeGraphs
from vllm.v1.worker.input_batch import InputBatch, StepInputs, prepare_step
from vllm.v1.worker.rank_context import RankContext

LogitsOf = Callable[[Tensor], Tensor]


class ModelRunner:
    """Owns the rows of the running requests; the worker owns the model, the caches, the graphs and the ops."""

    def __init__(self, rank: RankContext, model: CausalLM, graphs: DecodeGraphs | None) -> None:
        config = rank.config
        self.model, self.graphs, self.device = model, graphs, rank.device
        self.block_size = config.cache.block_size
        self.batch = InputBatch(config.scheduler.max_num_seqs, config.model.max_model_len, self.block_size)
        # In lock-step other replicas use all rows.
        self._may_prune = model.prunes_last_layer and not config.parallel.steps_in_lockstep
        self.sampler = Sampler(config.model.hf.vocab_size, rank.ops, rank.device, config.logprobs_mode)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput, exchange: StepExchange, caches: list[KVCache]) -> SamplerOutput:
        """Run one step; return samples, in the step's order, of the requests whose tokens are all computed now."""
        rows = self.batch.update(step)
        num_drafts = self.batch.write_drafts(step)
        inputs = prepare_step(self.batch, rows, np.array(step.num_tokens, dtype=np.int64), num_drafts)
        states_T, logits_of = self._forward(inputs, exchange, caches)
        unscored: list[Request] = []
        if self.batch.prompts_to_score:
            unscored = score_prompts(states_T, inputs, self.batch.prompts_to_score, logits_of)
        if len(inputs.sampled_rows) == 0:
            return SamplerOutput(np.empty(0, dtype=np.int64), [], None, unscored)
        if inputs.sampled_T is not None and len(states_T) > len(inputs.sampled_T):
            states_T = states_T.index_select(0, self._send(inputs.sampled_T))
        lens = None if num_drafts is None else inputs.sampled_lens
        output = self.sampler(logits_of(states_T), self.batch, inputs.sampled_rows, lens)
        output.unscored = unscored
        if num_drafts is None:
            self.batch.append_tokens(inputs.sampled_rows, output.token_ids)
        else:
            output, counts = accepted(step, output)
            sampled = [self.batch.row_of[request.request_id] for request in step.sampled]
            self.batch.append_tokens(np.array(sampled), output.token_ids, counts)
        return output

    def _forward(self, inputs: StepInputs, exchange: StepExchange, caches: list[KVCache]) -> tuple[Tensor, LogitsOf]:
        """Return the rows of all tokens, or of those to sample after, and the function that turns rows into logits.

        A graph runs the step when every replica decodes and a graph is large enough for all.
        """
        if self.graphs is not None and exchange.is_decode_everywhere:
            size = self.graphs.size_for(max(exchange.token_counts))
            if size is not None:
                states_B = self.graphs.run(inputs, self.batch.block_table[inputs.rows_B], size, caches)
                return states_B, _as_they_are if self.graphs.makes_logits(size) else self.model.compute_logits
        context = self._context(inputs, exchange.token_counts)
        keeps_choices = len(caches) > len(self.model.layers)
        if self._may_prune and context.prefill is not None and not (self.batch.prompts_to_score or keeps_choices):
            context.last_layer = self._sampled_alone(inputs, context)
        return self.model(self._send(inputs.token_ids_T), caches, context), self.model.compute_logits

    def _sampled_alone(self, inputs: StepInputs, context: ForwardContext) -> ForwardContext | None:
        """Return the last layer's context, the tokens to sample after as a decode step; None when there are none."""
        if inputs.sampled_T is None or len(inputs.sampled_T) == 0:
            return None
        rows, count = inputs.sampled_rows, len(inputs.sampled_rows)
        return replace(
            context,
            num_tokens=count,
            num_decode_tokens=count,
            decode=self._decode(rows, inputs.sampled_lens),
            prefill=None,
            dp_token_counts=[count],
            sampled_B=self._send(inputs.sampled_T),
        )

    def _context(self, inputs: StepInputs, dp_token_counts: list[int]) -> ForwardContext:
        return ForwardContext(
            num_tokens=len(inputs.token_ids_T),
            num_decode_tokens=inputs.num_decode,
            positions_T=self._send(inputs.positions_T),
            slots_T=self._send(inputs.slots_T),
            decode=self._decode(inputs.rows_B[: inputs.num_decode], inputs.seq_lens_B[: inputs.num_decode]),
            prefill=self._prefill(inputs),
            dp_token_counts=dp_token_counts,
        )

    def _decode(self, rows: np.ndarray, seq_lens: np.ndarray) -> DecodeMetadata | None:
        if len(rows) == 0:
            return None
        return DecodeMetadata(
            seq_lens, self._send(seq_lens.astype(np.int32)), self._tables(rows, seq_lens), self.block_size
        )

    def _prefill(self, inputs: StepInputs) -> PrefillMetadata | None:
        if inputs.num_decode == len(inputs.rows_B):
            return None
        columns = inputs.rows_B, inputs.seq_lens_B, inputs.query_lens_B
        rows, seq_lens, query_lens = (column[inputs.num_decode :] for column in columns)
        cu_query_lens = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
        on_device = self._send(cu_query_lens), self._send(seq_lens.astype(np.int32)), self._tables(rows, seq_lens)
        return PrefillMetadata(query_lens, seq_lens, *on_device, self.block_size)

    def _tables(self, rows: np.ndarray, seq_lens: np.ndarray) -> Tensor:
        width = -(-int(seq_lens.max()) // self.block_size)
        return self._send(self.batch.block_table[rows, :width])

    def _send(self, array: np.ndarray) -> Tensor:
        return async_tensor_h2d(array, self.device)


def _as_they_are(rows: Tensor) -> Tensor:
    return rows

"""Runs the model on a scheduled step: host arrays to device tensors, forward, logits, samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.forward_context import ForwardContext
from vllm.model_executor.models.deepseek_v2 import DeepseekV3ForCausalLM
from vllm.ops.contract import DecodeMetadata, KVCache, PrefillMetadata, RolloutOps
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.sample.sampler import Sampler, SamplerOutput
from vllm.v1.worker.input_batch import InputBatch


@dataclass
class PreparedStep:
    """A step on the device, sequences reordered: those with one new token first."""

    ids_T: Tensor
    context: ForwardContext
    sampled_T: (
        Tensor | None
    )  # int64 rows of the hidden states to sample from, in the step's order; None = all, in order
    sampled_rows: np.ndarray  # batch rows they belong to


class ModelRunner:
    """Owns the rows of the running requests; the model, the caches and the ops are the worker's."""

    def __init__(self, config: VllmConfig, model: DeepseekV3ForCausalLM, ops: RolloutOps, device: torch.device) -> None:
        self.model, self.device = model, device
        self.block_size = config.cache.block_size
        self.batch = InputBatch(config.scheduler.max_num_seqs, config.model.max_model_len, self.block_size)
        self.sampler = Sampler(config.model.hf.vocab_size, ops, device)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput, dp_token_counts: list[int], caches: list[KVCache]) -> SamplerOutput:
        """Run one step; its samples, in the step's order, of the requests with no uncomputed token left."""
        rows = self.batch.update(step)
        prepared = self._prepare(rows, np.array(step.num_tokens, dtype=np.int64), dp_token_counts)
        hidden_TH = self.model(prepared.ids_T, caches, prepared.context)
        if len(prepared.sampled_rows) == 0:
            return SamplerOutput(np.empty(0, dtype=np.int64), [], None)
        if prepared.sampled_T is not None:
            hidden_TH = hidden_TH.index_select(0, prepared.sampled_T)
        output = self.sampler(self.model.compute_logits(hidden_TH), self.batch, prepared.sampled_rows)
        self.batch.append_tokens(prepared.sampled_rows, output.token_ids)
        return output

    def _prepare(self, rows: np.ndarray, num_new: np.ndarray, dp_token_counts: list[int]) -> PreparedStep:
        batch = self.batch
        computed = batch.num_computed[rows]
        if len(rows) == 0 or int(num_new.max()) == 1:  # a decode step, the common one: one token per row, in order
            order, num_decode = None, len(rows)
            token_rows, positions = rows, computed
            sampled = computed + 1 == batch.num_tokens[rows]
            sampled_T, sampled_rows = (
                (None, rows) if sampled.all() else (self._send(np.flatnonzero(sampled)), rows[sampled])
            )
        else:
            order = np.concatenate((np.flatnonzero(num_new == 1), np.flatnonzero(num_new > 1)))
            num_decode = int((num_new == 1).sum())
            ordered_new, starts = num_new[order], np.cumsum(num_new[order]) - num_new[order]
            token_rows = np.repeat(rows[order], ordered_new)
            positions = np.arange(len(token_rows)) + np.repeat(computed[order] - starts, ordered_new)
            last_token = np.empty_like(starts)
            last_token[order] = starts + ordered_new - 1
            sampled = computed + num_new == batch.num_tokens[rows]
            sampled_T, sampled_rows = self._send(last_token[sampled]), rows[sampled]
        seq_lens = computed + num_new
        batch.num_computed[rows] = seq_lens
        slots = batch.block_table[token_rows, positions // self.block_size].astype(np.int64) * self.block_size
        slots += positions % self.block_size
        ordered = slice(None) if order is None else order
        rows, seq_lens, num_new = rows[ordered], seq_lens[ordered], num_new[ordered]
        context = ForwardContext(
            num_tokens=len(token_rows),
            num_decode_tokens=num_decode,
            positions_T=self._send(positions),
            slots_T=self._send(slots),
            decode=self._decode(rows[:num_decode], seq_lens[:num_decode]),
            prefill=self._prefill(rows[num_decode:], seq_lens[num_decode:], num_new[num_decode:]),
            dp_token_counts=dp_token_counts,
        )
        return PreparedStep(self._send(batch.token_ids[token_rows, positions]), context, sampled_T, sampled_rows)

    def _decode(self, rows: np.ndarray, seq_lens: np.ndarray) -> DecodeMetadata | None:
        if len(rows) == 0:
            return None
        return DecodeMetadata(
            seq_lens, self._send(seq_lens.astype(np.int32)), self._tables(rows, seq_lens), self.block_size
        )

    def _prefill(self, rows: np.ndarray, seq_lens: np.ndarray, query_lens: np.ndarray) -> PrefillMetadata | None:
        if len(rows) == 0:
            return None
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

"""What the layers of a model read of a step: host arrays to tensors on the device.

Letters: T tokens of a step, B sequences.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from vllm.forward_context import ForwardContext
from vllm.ops.contract import DecodeMetadata, PrefillMetadata
from vllm.utils import async_tensor_h2d
from vllm.v1.worker.input_batch import InputBatch, StepInputs


class ContextBuilder:
    """Builds the contexts of steps that run without a graph."""

    def __init__(self, batch: InputBatch, device: torch.device) -> None:
        self._batch, self._device = batch, device

    def context(self, inputs: StepInputs, dp_token_counts: list[int]) -> ForwardContext:
        return ForwardContext(
            num_tokens=len(inputs.token_ids_T),
            num_decode_tokens=inputs.num_decode,
            positions_T=self.send(inputs.positions_T),
            slots_T=self.send(inputs.slots_T),
            decode=self._decode(inputs),
            prefill=self._prefill(inputs),
            dp_token_counts=dp_token_counts,
        )

    def sampled_alone(self, inputs: StepInputs, context: ForwardContext) -> ForwardContext | None:
        """Return the last layer's context, the tokens to sample after as a decode step; None when there are none."""
        if inputs.sampled_T is None or len(inputs.sampled_T) == 0:
            return None
        rows, lens, count = inputs.sampled_rows, inputs.sampled_lens, len(inputs.sampled_rows)
        return replace(
            context,
            num_tokens=count,
            num_decode_tokens=count,
            decode=self._decode(replace(inputs, rows_B=rows, seq_lens_B=lens, num_decode=count)),
            prefill=None,
            dp_token_counts=[count],
            sampled_B=self.send(inputs.sampled_T),
        )

    def send(self, array: np.ndarray) -> Tensor:
        return async_tensor_h2d(array, self._device)

    def _decode(self, inputs: StepInputs) -> DecodeMetadata | None:
        if inputs.num_decode == 0:
            return None
        sequences = slice(0, inputs.num_decode)
        seq_lens = inputs.seq_lens_B[sequences]
        lens, tables = self.send(seq_lens.astype(np.int32)), self._tables(inputs, sequences)
        return DecodeMetadata(seq_lens, lens, tables, self._batch.block_size)

    def _prefill(self, inputs: StepInputs) -> PrefillMetadata | None:
        if inputs.num_decode == len(inputs.rows_B):
            return None
        sequences = slice(inputs.num_decode, None)
        seq_lens, query_lens = inputs.seq_lens_B[sequences], inputs.query_lens_B[sequences]
        cu_query_lens = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
        on_device = self.send(cu_query_lens), self.send(seq_lens.astype(np.int32)), self._tables(inputs, sequences)
        return PrefillMetadata(query_lens, seq_lens, *on_device, self._batch.block_size)

    def _tables(self, inputs: StepInputs, sequences: slice) -> Tensor:
        width = -(-int(inputs.seq_lens_B[sequences].max()) // self._batch.block_size)
        return self.send(self._batch.tables(inputs, sequences, width))

"""Causal attention of packed new tokens over their cached context, which the prefill ops share, and where that lies."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm.ops.contract import PrefillMetadata

# The kernel reads causality from one fixed triangle of this size, whatever the sequence lengths are.
MASK_SIZE = 2048
CAUSAL_FROM_THE_END = 3  # sparse_mode: the last query sees the last key


class CausalAttention:
    """Each new token attends to the tokens of its sequence up to itself. Holds the triangle (4 MiB) of each device."""

    def __init__(self) -> None:
        self._triangles: dict[torch.device, Tensor] = {}

    def __call__(self, q_TND: Tensor, k_SGD: Tensor, v_SGD: Tensor, meta: PrefillMetadata, scale: float) -> Tensor:
        """[T, N, D], as one kernel."""
        import torch_npu

        out_TND: Tensor = torch_npu.npu_fusion_attention(
            q_TND,
            k_SGD,
            v_SGD,
            q_TND.shape[1],
            "TND",
            atten_mask=self.triangle(q_TND.device),
            scale=scale,
            actual_seq_qlen=np.cumsum(meta.query_lens_host).tolist(),
            actual_seq_kvlen=np.cumsum(meta.seq_lens_host).tolist(),
            sparse_mode=CAUSAL_FROM_THE_END,
        )[0]
        return out_TND

    def triangle(self, device: torch.device) -> Tensor:
        """bool, True where a key is out of sight."""
        if device not in self._triangles:
            full = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device)
            self._triangles[device] = full.triu(diagonal=1)
        return self._triangles[device]


def context_slots(meta: PrefillMetadata) -> Tensor:
    """[S] cache slot of every context token of the step's sequences, one sequence after the other; once per step."""
    if "context_slots" not in meta.scratch:
        num_tokens = int(meta.seq_lens_host.sum())
        lens_B = meta.seq_lens.long()
        sequence_S = torch.repeat_interleave(
            torch.arange(len(lens_B), device=lens_B.device), lens_B, output_size=num_tokens
        )
        starts_B = lens_B.cumsum(0) - lens_B
        position_S = torch.arange(num_tokens, device=lens_B.device) - starts_B[sequence_S]
        block_S = meta.block_tables[sequence_S, position_S // meta.block_size].long()
        meta.scratch["context_slots"] = block_S * meta.block_size + position_S % meta.block_size
    slots: Tensor = meta.scratch["context_slots"]
    return slots

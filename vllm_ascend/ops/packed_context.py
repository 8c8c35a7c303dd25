"""What the packed attention kernel wants of a prefill step: its causal triangle, and where the context lies."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops.contract import PrefillMetadata

# The kernel reads causality from one fixed triangle of this size, whatever the sequence lengths are.
MASK_SIZE = 2048
CAUSAL_FROM_THE_END = 3  # sparse_mode: the last query sees the last key


class CausalTriangle:
    """Holds the triangle (4 MiB) of each device it was asked for."""

    def __init__(self) -> None:
        self._masks: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        if device not in self._masks:
            full = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device)
            self._masks[device] = full.triu(diagonal=1)  # True = out of sight
        return self._masks[device]


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

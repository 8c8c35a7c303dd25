"""Tables of cos and sin for rotary positions."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_formats.rope import RopeConfig
from vllm.ops.contract import Angles


class RotaryTable:
    """cos and sin of every position up to max_len: fp32 [max_len, R], the R/2 angles repeated in the second half."""

    def __init__(self, rope: RopeConfig, rope_dim: int, max_len: int, device: torch.device) -> None:
        frequencies = torch.tensor(rope.inverse_frequencies(rope_dim), dtype=torch.float32)
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), frequencies)
        table = torch.cat((angles, angles), dim=-1)
        self.cos = (table.cos() * rope.amplitude).to(device)
        self.sin = (table.sin() * rope.amplitude).to(device)

    def at(self, positions_T: Tensor) -> Angles:
        """Return (cos [T, R], sin [T, R])."""
        return self.cos.index_select(0, positions_T), self.sin.index_select(0, positions_T)

"""Rotary position tables: plain, and YaRN (arXiv:2309.00071) with DeepSeek's mscale."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vllm.transformers_utils.config import RopeConfig


def yarn_mscale(factor: float, mscale: float) -> float:
    """Attention temperature of a context stretched by `factor`: 0.1 mscale ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def softmax_scale(rope: RopeConfig, qk_head_dim: int) -> float:
    """1 / sqrt(head dim), times yarn_mscale(factor, mscale_all_dim)^2 when the config asks for it."""
    scale = qk_head_dim**-0.5
    if rope.rope_type == "yarn" and rope.mscale_all_dim:
        scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
    return scale


class RotaryTable:
    """cos and sin of every position up to max_len: fp32 [max_len, R], the R/2 angles repeated in the second half."""

    def __init__(self, rope: RopeConfig, rope_dim: int, max_len: int, device: torch.device) -> None:
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), _inverse_frequencies(rope, rope_dim))
        table = torch.cat((angles, angles), dim=-1)
        magnitude = _table_magnitude(rope)
        self.cos = (table.cos() * magnitude).to(device)
        self.sin = (table.sin() * magnitude).to(device)

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """(cos [T, R], sin [T, R])."""
        return self.cos.index_select(0, positions_T), self.sin.index_select(0, positions_T)


def _table_magnitude(rope: RopeConfig) -> float:
    """YaRN's factor on cos and sin; with DeepSeek's equal mscale and mscale_all_dim it is 1."""
    if rope.rope_type != "yarn":
        return 1.0
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor, 1.0)


def _inverse_frequencies(rope: RopeConfig, dim: int) -> Tensor:
    """fp32 [dim/2]; YaRN keeps fast rotations, slows slow ones down by `factor`, and blends linearly in between."""
    base = 1.0 / rope.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.rope_type != "yarn":
        return base

    def dim_of(num_rotations: float) -> float:
        wavelengths = rope.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return dim * math.log(wavelengths) / (2 * math.log(rope.rope_theta))

    low = max(math.floor(dim_of(rope.beta_fast)), 0)
    high: float = min(math.ceil(dim_of(rope.beta_slow)), dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by zero
    slow = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return base / rope.factor * slow + base * (1 - slow)

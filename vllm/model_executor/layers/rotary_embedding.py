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
    scale = 1.0 / math.sqrt(qk_head_dim)
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
    """fp32 [dim/2]; YaRN keeps fast rotations, slows slow ones down by `factor`, and blends linearly in between.

    Computed in float64 and rounded once, as the training engine does: the angles of both are equal bit for bit.
    """
    plain = [rope.rope_theta ** (-2 * i / dim) for i in range(dim // 2)]
    if rope.rope_type != "yarn":
        return torch.tensor(plain, dtype=torch.float32)

    def dim_of(num_rotations: float) -> float:
        wavelengths = rope.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return dim * math.log(wavelengths) / (2 * math.log(rope.rope_theta))

    low = max(math.floor(dim_of(rope.beta_fast)), 0)
    high = min(math.ceil(dim_of(rope.beta_slow)), dim - 1)
    width = (high - low) or 0.001  # a step instead of a ramp, without dividing by zero
    slow = [min(max((i - low) / width, 0.0), 1.0) for i in range(dim // 2)]
    blended = [f * (1 - share) + f / rope.factor * share for f, share in zip(plain, slow, strict=True)]
    return torch.tensor(blended, dtype=torch.float32)

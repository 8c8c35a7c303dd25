"""Rotary positions of the training engine."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_formats.rope import RopeConfig
from megatron.core.transformer.transformer_config import TransformerConfig


class RotaryEmbedding(nn.Module):
    """Position ids int64 [T] -> cos and sin, float32 [T, R/2], one column per rotated pair."""

    inv_freq: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        rope = rope_config(config)
        self.amplitude = rope.amplitude
        frequencies = torch.tensor(rope.inverse_frequencies(config.rope_dim), dtype=torch.float32)
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(self, position_ids_T: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids_T.to(torch.float32).unsqueeze(1) * self.inv_freq
        return angles.cos() * self.amplitude, angles.sin() * self.amplitude


def rope_config(config: TransformerConfig) -> RopeConfig:
    """Return the rotary positions that the config describes under Megatron's names."""
    if config.rope_type == "rope":
        return RopeConfig(rope_theta=config.rotary_base)
    return RopeConfig(
        rope_type=config.rope_type,
        rope_theta=config.rotary_base,
        factor=config.rotary_scaling_factor,
        original_max_position_embeddings=config.original_max_position_embeddings,
        beta_fast=config.beta_fast,
        beta_slow=config.beta_slow,
        mscale=config.mscale,
        mscale_all_dim=config.mscale_all_dim,
        low_freq_factor=config.rope_low_freq_factor,
        high_freq_factor=config.rope_high_freq_factor,
    )


def attention_scale(config: TransformerConfig) -> float:
    """Return the factor on ``q k^T``."""
    return rope_config(config).softmax_scale(config.softmax_head_size)

"""Rotary positions with YaRN's stretched frequencies (arXiv 2309.00071), as DeepSeek uses them."""

from __future__ import annotations

import math

import torch
from torch import nn

from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig


def make_rotary_embedding(config: TransformerConfig) -> RotaryEmbedding | YarnRotaryEmbedding:
    """The rotary positions of the config's kind of attention."""
    return YarnRotaryEmbedding(config) if isinstance(config, MLATransformerConfig) else RotaryEmbedding(config)


class RotaryEmbedding(nn.Module):
    """Plain rotary positions (arXiv 2104.09864): ids int64 [T] -> cos and sin, float32 [T, R/2]; R is the head size."""

    inv_freq: torch.Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        frequencies = plain_frequencies(config.rotary_base, config.head_size)
        self.register_buffer("inv_freq", torch.tensor(frequencies, dtype=torch.float32), persistent=False)

    def forward(self, position_ids_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids_T.to(torch.float32).unsqueeze(1) * self.inv_freq
        return angles.cos(), angles.sin()


class YarnRotaryEmbedding(nn.Module):
    """Position ids int64 [T] -> cos and sin, float32 [T, R/2], one column per rotated pair."""

    inv_freq: torch.Tensor

    def __init__(self, config: MLATransformerConfig) -> None:
        super().__init__()
        is_yarn = config.rope_type == "yarn"
        frequencies = yarn_frequencies(config) if is_yarn else rope_frequencies(config)
        self.amplitude = 1.0
        if is_yarn:
            factor = config.rotary_scaling_factor
            self.amplitude = yarn_mscale(factor, config.mscale) / yarn_mscale(factor, config.mscale_all_dim)
        self.register_buffer("inv_freq", torch.tensor(frequencies, dtype=torch.float32), persistent=False)

    def forward(self, position_ids_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids_T.to(torch.float32).unsqueeze(1) * self.inv_freq
        return angles.cos() * self.amplitude, angles.sin() * self.amplitude


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature: ``0.1 mscale ln(factor) + 1``, and 1 when nothing is stretched."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def attention_scale(config: MLATransformerConfig) -> float:
    """What ``q k^T`` is multiplied with: ``1/sqrt(head size)``, times ``yarn_mscale(factor, mscale_all_dim)^2``."""
    scale = 1.0 / math.sqrt(config.qk_head_dim + config.qk_pos_emb_head_dim)
    if config.rope_type == "yarn":
        scale *= yarn_mscale(config.rotary_scaling_factor, config.mscale_all_dim) ** 2
    return scale


def rope_frequencies(config: MLATransformerConfig) -> list[float]:
    """Plain frequencies of the rotary part of a head."""
    return plain_frequencies(config.rotary_base, config.qk_pos_emb_head_dim)


def plain_frequencies(base: float, size: int) -> list[float]:
    """``base^(-2i/R)``, i in 0..R/2-1 (arXiv 2104.09864)."""
    return [base ** (-2 * i / size) for i in range(size // 2)]


def yarn_frequencies(config: MLATransformerConfig) -> list[float]:
    """Fast pairs keep their frequency, slow ones are divided by the factor, with a linear ramp between.

    The ramp goes from the pair that turns ``beta_fast`` times within the original context to the one that turns
    ``beta_slow`` times.
    """
    size = config.qk_pos_emb_head_dim

    def pair_of_turns(turns: float) -> float:
        length = config.original_max_position_embeddings / (turns * 2 * math.pi)
        return size * math.log(length) / (2 * math.log(config.rotary_base))

    low = max(math.floor(pair_of_turns(config.beta_fast)), 0)
    high = min(math.ceil(pair_of_turns(config.beta_slow)), size - 1)
    width = (high - low) or 0.001
    stretched = [min(max((i - low) / width, 0.0), 1.0) for i in range(size // 2)]
    return [
        frequency * (1 - share) + frequency / config.rotary_scaling_factor * share
        for frequency, share in zip(rope_frequencies(config), stretched, strict=True)
    ]

"""Floating-point operations of a training step (upstream: ``verl.utils.flops_counter``).

Forward and backward take 6 operations for each weight that a token meets, and 12 for each pair of tokens, head and
feature of a head in the attention. Both embeddings count, as upstream counts them; recomputation does not.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from hf_formats.families import FAMILIES
from verl.utils.device import resolve_device

logger = logging.getLogger(__name__)

VALID_CONFIG_TYPE = {*FAMILIES, "mistral", "qwen2_moe"}
"""Model types that are known to be counted right; any other is counted by its config's keys too."""

# Sizes of every decoder that is counted; others decide what its attention and its layers are.
_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "intermediate_size",
)
_NUM_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")

# Dense matrix products in bfloat16 of a device, by a part of its name; operations a second.
_PEAKS = {
    "MI300X": 1336e12,
    "H100": 989e12,
    "H800": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362.05e12,
    "L40": 181.05e12,
    "L20": 119.5e12,
    "H20": 148e12,
    "910B": 354e12,
    "RTX 3070 Ti": 21.75e12,
}
_UNITS = {"B": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


def get_device_flops(unit: str = "T") -> float:
    """What this process's device can do at most in a second, in units of B (one), K, M, G, T or P.

    Infinite on a device that is not in the table, and on a CPU: a share of it is then 0.
    """
    if unit not in _UNITS:
        raise ValueError(f"unit is {unit!r}; expected one of {', '.join(_UNITS)}")
    device = resolve_device("auto")
    module = getattr(torch, device, None)
    name = module.get_device_name() if device != "cpu" and module is not None else "CPU"
    return next((peak for part, peak in _PEAKS.items() if part in name), float("inf")) / _UNITS[unit]


class FlopsCounter:
    """Operations of steps of a decoder with a Hugging Face ``config``; 0 for one without a decoder's sizes.

    Its keys say what it has: latent attention (``kv_lora_rank``) or attention in groups, experts under any of their
    names, the dense layers before them.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        missing = [key for key in _SIZES if not getattr(config, key, None)]
        self._is_counted = not missing
        if missing:
            logger.warning(
                "the operations of %s are not counted, its config has no %s: its share of the peak is 0",
                config.model_type,
                ", ".join(missing),
            )

    def estimate_flops(self, batch_seqlens: Sequence[int], delta_time: float) -> tuple[float, float]:
        """(10^12 operations a second, the device's peak) of a step on these sequences in ``delta_time`` seconds."""
        weights, pair_width = self._sizes()
        dense = 6 * weights * sum(batch_seqlens)
        attention = 12 * pair_width * sum(length * length for length in batch_seqlens)
        return (dense + attention) / delta_time / 1e12, get_device_flops()

    def _sizes(self) -> tuple[int, int]:
        """(weights that a token meets, features of all heads of all layers)."""
        if not self._is_counted:
            return 0, 0
        config = self.config
        hidden, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
        if getattr(config, "kv_lora_rank", None):
            width = config.qk_nope_head_dim + config.qk_rope_head_dim
            attention = self._latent_attention(width)
        else:
            width = getattr(config, "head_dim", None) or hidden // heads
            attention = hidden * width * (2 * heads + 2 * config.num_key_value_heads)
        return attention * layers + self._mlps() + 2 * config.vocab_size * hidden, width * heads * layers

    def _mlps(self) -> int:
        """Weights that a token meets in the dense layers, routers and experts."""
        config = self.config
        num_experts = next((count for key in _NUM_EXPERTS if (count := getattr(config, key, None))), 0)
        num_dense = getattr(config, "first_k_dense_replace", None) or 0 if num_experts else config.num_hidden_layers
        dense = 3 * config.hidden_size * config.intermediate_size * num_dense
        if not num_experts:
            return dense
        width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        num_met = config.num_experts_per_tok + (getattr(config, "n_shared_experts", None) or 0)
        of_experts = config.hidden_size * (num_experts + 3 * width * num_met)
        return dense + of_experts * (config.num_hidden_layers - num_dense)

    def _latent_attention(self, width: int) -> int:
        """Weights of a layer's attention with latent keys and values."""
        config = self.config
        hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.q_lora_rank
        queries = hidden * heads * width if rank is None else hidden * rank + rank * heads * width
        down = hidden * (config.kv_lora_rank + config.qk_rope_head_dim)
        up = heads * (config.qk_nope_head_dim + config.v_head_dim) * config.kv_lora_rank
        return queries + down + up + heads * config.v_head_dim * hidden

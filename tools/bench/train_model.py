"""The model and the batches of the training benchmark, the same for both engines."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from hf_formats.config import HFModelConfig, parse_hf_config


def hf_config_dict(hidden_size: int, num_layers: int, num_experts: int, vocab_size: int) -> dict[str, Any]:
    """A DeepSeek-V3-form config.json: one dense layer, then MoE layers, widths in about DeepSeek-V3's proportions."""
    return {
        "model_type": "deepseek_v3",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": hidden_size * 11 // 4,
        "moe_intermediate_size": hidden_size // 2,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden_size // 64,
        "num_key_value_heads": hidden_size // 64,
        "n_routed_experts": num_experts,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "q_lora_rank": hidden_size * 3 // 8,
        "kv_lora_rank": hidden_size // 4,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
    }


@dataclass(frozen=True)
class Batch:
    """Token ids of the sequences of one step; each sequence predicts its own tokens from the second on."""

    sequences: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return sum(map(len, self.sequences))


def equal_batch(num_tokens: int, length: int, vocab_size: int, seed: int) -> Batch:
    """Sequences of one length."""
    return _random_batch([length] * max(1, num_tokens // length), vocab_size, seed)


def mixed_batch(num_tokens: int, longest: int, vocab_size: int, seed: int) -> Batch:
    """Lengths as of reasoning responses to DeepScaleR's problems: log-normal, most short, a few at the limit.

    The median is a sixth of ``longest`` and sigma 0.9, about what a run under a response limit shows.
    """
    rng = random.Random(seed)
    lengths: list[int] = []
    while sum(lengths) < num_tokens:
        lengths.append(min(longest, max(16, round(rng.lognormvariate(0.0, 0.9) * longest / 6))))
    return _random_batch(lengths, vocab_size, seed)


def matmul_flops(hf: HFModelConfig, lengths: list[int]) -> float:
    """Floating-point operations of the matmuls of one forward and backward pass over sequences of these lengths.

    Per token and weight that takes part: 2 forward, 4 backward; attention scores and values over the causal half. The
    embedding is a lookup; norms, activations and the optimizer are not counted (the convention of "MFU", PaLM, arXiv
    2204.02311, appendix B).
    """
    heads, hidden = hf.num_attention_heads, hf.hidden_size
    q_rank = hf.q_lora_rank
    query = heads * hf.qk_head_dim * hidden if q_rank is None else q_rank * (hidden + heads * hf.qk_head_dim)
    latent = hidden * (hf.kv_lora_rank + hf.qk_rope_head_dim)
    up = hf.kv_lora_rank * heads * (hf.qk_nope_head_dim + hf.v_head_dim)
    attention = query + latent + up + heads * hf.v_head_dim * hidden
    expert = 3 * hidden * hf.moe_intermediate_size
    moe = expert * (hf.num_experts_per_tok + hf.n_shared_experts) + hidden * hf.n_routed_experts
    dense = 3 * hidden * hf.intermediate_size
    num_moe = sum(hf.is_moe_layer(layer) for layer in range(hf.num_hidden_layers))
    num_dense = hf.num_hidden_layers - num_moe
    weights = hf.num_hidden_layers * attention + num_moe * moe + num_dense * dense + hf.vocab_size * hidden
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    scores = pairs * heads * (hf.qk_head_dim + hf.v_head_dim) * hf.num_hidden_layers
    return 6.0 * (weights * sum(lengths) + scores)


def parsed(raw: dict[str, Any]) -> HFModelConfig:
    """The typed form of ``hf_config_dict``."""
    return parse_hf_config(raw, source="benchmark model")


def _random_batch(lengths: list[int], vocab_size: int, seed: int) -> Batch:
    rng = random.Random(seed)
    return Batch(tuple(tuple(rng.randrange(vocab_size) for _ in range(length)) for length in lengths))

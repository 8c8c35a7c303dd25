"""Parameters of one rank by arithmetic from config.json's figures: the same numbers as the models that a run builds.

Multi-token-prediction modules are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hf_formats.config import HFModelConfig
from megatron.core.parallel_layout import ParallelLayout


@dataclass(frozen=True)
class Parameters:
    """cut: split over tensor-parallel ranks · whole: on every one of them · experts: routed ones."""

    cut: int = 0
    whole: int = 0
    experts: int = 0

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(self.cut + other.cut, self.whole + other.whole, self.experts + other.experts)

    def on_rank(self, tp: int, expert_ranks: int) -> tuple[int, int]:
        """(not experts, experts) of one of ``tp`` ranks and of one of ``expert_ranks``."""
        return self.cut // tp + self.whole, self.experts // expert_ranks


@lru_cache(maxsize=16)
def layer(hf: HFModelConfig, is_moe: bool, cuts_latent_down: bool) -> Parameters:
    """One decoder layer. cuts_latent_down: ``mla_down_proj_column_parallel``."""
    hidden = hf.hidden_size
    attention = _latent(hf, cuts_latent_down) if hf.is_mla else _grouped_query(hf)
    norms = Parameters(whole=2 * hidden)
    if not is_moe:
        return attention + norms + Parameters(cut=3 * hidden * hf.intermediate_size)
    return (
        attention
        + norms
        + Parameters(
            cut=3 * hidden * hf.shared_expert_intermediate_size,
            whole=hidden * hf.n_routed_experts,
            experts=3 * hidden * hf.moe_intermediate_size * hf.n_routed_experts,
        )
    )


@lru_cache(maxsize=4096)
def training_stage(hf: HFModelConfig, layout: ParallelLayout, stage: int) -> tuple[int, int]:
    """(not experts, experts) on a rank of pipeline stage ``stage``."""
    total = Parameters()
    for number in layout.stage_layers(stage, hf.num_hidden_layers):
        total += layer(hf, hf.is_moe_layer(number), layout.mla_down_proj_column_parallel)
    vocabulary = hf.vocab_size * hf.hidden_size
    is_last = stage == layout.pipeline_model_parallel_size - 1
    if stage == 0:
        total += Parameters(cut=vocabulary)
    if is_last:
        shares = hf.tie_word_embeddings and stage == 0
        total += Parameters(cut=0 if shares else vocabulary, whole=hf.hidden_size)
    expert_ranks = layout.expert_model_parallel_size * layout.expert_tensor_parallel_size
    return total.on_rank(layout.tensor_model_parallel_size, expert_ranks)


@lru_cache(maxsize=512)
def rollout_rank(hf: HFModelConfig, tp: int, expert_ranks: int) -> tuple[int, int]:
    """(all but the gates of MoE layers, those gates) on a rollout rank; experts split or cut over ``expert_ranks``."""
    total = Parameters(cut=hf.vocab_size * hf.hidden_size * (1 if hf.tie_word_embeddings else 2), whole=hf.hidden_size)
    for number in range(hf.num_hidden_layers):
        total += layer(hf, hf.is_moe_layer(number), False)
    routers = hf.num_moe_layers * hf.hidden_size * hf.n_routed_experts
    return sum(total.on_rank(tp, expert_ranks)) - routers, routers


def _latent(hf: HFModelConfig, cuts_down: bool) -> Parameters:
    hidden, heads = hf.hidden_size, hf.num_attention_heads
    key_down = hidden * (hf.kv_lora_rank + hf.qk_rope_head_dim)
    up = hf.kv_lora_rank * heads * (hf.qk_nope_head_dim + hf.v_head_dim)
    out = heads * hf.v_head_dim * hidden
    if hf.q_lora_rank is None:
        query_down, norm, query = 0, 0, hidden * heads * hf.qk_head_dim
    else:
        query_down, norm, query = hidden * hf.q_lora_rank, hf.q_lora_rank, hf.q_lora_rank * heads * hf.qk_head_dim
    cut, whole = up + out + query, hf.kv_lora_rank + norm
    down = query_down + key_down
    return Parameters(cut + down, whole) if cuts_down else Parameters(cut, whole + down)


def _grouped_query(hf: HFModelConfig) -> Parameters:
    heads, groups, width = hf.num_attention_heads, hf.num_key_value_heads, hf.head_dim
    return Parameters(cut=hf.hidden_size * width * (2 * heads + 2 * groups), whole=2 * width)

"""The training model of a Hugging Face config, and the training engine's config of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hf_formats.config import HFModelConfig

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel, ModelChunks
    from megatron.core.ops import TrainOps
    from megatron.core.parallel_layout import ParallelLayout
    from megatron.core.parallel_state import ProcessGroups
    from megatron.core.transformer.transformer_config import TransformerConfig


def build_model(
    hf: HFModelConfig, groups: ProcessGroups, ops: TrainOps, *, params_dtype: torch.dtype, **overrides: Any
) -> GPTModel | ModelChunks:
    """This rank's part of the model, weights not yet set; ``overrides`` are MLATransformerConfig fields."""
    from megatron.core.models.gpt import make_gpt_model

    config = to_transformer_config(hf, params_dtype=params_dtype, layout=groups.layout, **overrides)
    return make_gpt_model(config, groups, ops)


def to_transformer_config(
    hf: HFModelConfig, *, params_dtype: torch.dtype, layout: ParallelLayout, **overrides: Any
) -> TransformerConfig:
    """Return the training engine's config of a model, an MLATransformerConfig for latent attention.

    ``overrides`` are fields of it (e.g. recompute). Sequence parallelism is on exactly when ``layout`` has tensor
    parallelism.
    """
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    fields: dict[str, Any] = {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "ffn_hidden_size": hf.intermediate_size,
        "vocab_size": hf.vocab_size,
        "layernorm_epsilon": hf.rms_norm_eps,
        "init_method_std": hf.initializer_range,
        "params_dtype": params_dtype,
        "sequence_parallel": layout.tensor_model_parallel_size > 1,
        "share_embeddings_and_output_weights": hf.tie_word_embeddings,
        "mtp_num_layers": hf.mtp_num_layers or None,
        **_rope_fields(hf),
    }
    if hf.n_routed_experts:
        fields |= _expert_fields(hf)
    if hf.is_mla:
        return MLATransformerConfig(**{**fields, **_latent_fields(hf), **overrides})
    fields |= {
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": hf.head_dim,
        "qk_layernorm": hf.qk_norm,
        "add_qkv_bias": hf.attention_bias,
        "rotary_percent": hf.rope_dim / hf.head_dim,
    }
    return TransformerConfig(**{**fields, **overrides})


def _rope_fields(hf: HFModelConfig) -> dict[str, Any]:
    rope = hf.rope
    return {
        "rope_type": "rope" if rope.rope_type == "default" else rope.rope_type,
        "rotary_base": rope.rope_theta,
        "rotary_scaling_factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim,
        "rope_low_freq_factor": rope.low_freq_factor,
        "rope_high_freq_factor": rope.high_freq_factor,
    }


def _expert_fields(hf: HFModelConfig) -> dict[str, Any]:
    if hf.topk_method == "group_limited_greedy" and hf.n_group > 1 and hf.scoring_func != "softmax":
        raise ValueError(
            f"topk_method is 'group_limited_greedy' with scoring_func {hf.scoring_func!r}; the training engine ranks "
            "groups by their best expert for softmax scores only, and sigmoid ones by their two best, as 'noaux_tc'"
        )
    is_grouped = hf.n_group > 1
    return {
        "num_moe_experts": hf.n_routed_experts,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": hf.shared_expert_intermediate_size or None,
        "moe_layer_freq": tuple(int(hf.is_moe_layer(layer)) for layer in range(hf.num_hidden_layers)),
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_router_num_groups": hf.n_group if is_grouped else None,
        "moe_router_group_topk": hf.topk_group if is_grouped else None,
        "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
        "moe_router_score_function": hf.scoring_func,
        # Softmax over the chosen experts only is softmax over all of them, then normalised over the chosen.
        "moe_router_pre_softmax": hf.scoring_func == "softmax" and not hf.norm_topk_prob,
        "moe_router_norm_topk_prob": hf.norm_topk_prob,
        "moe_router_enable_expert_bias": hf.has_expert_bias,
    }


def _latent_fields(hf: HFModelConfig) -> dict[str, Any]:
    return {
        "q_lora_rank": hf.q_lora_rank,
        "kv_lora_rank": hf.kv_lora_rank,
        "qk_head_dim": hf.qk_nope_head_dim,  # Megatron's name for the part without position
        "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
        "v_head_dim": hf.v_head_dim,
        "max_position_embeddings": hf.max_position_embeddings,
    }

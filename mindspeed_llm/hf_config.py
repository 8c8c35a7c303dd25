"""The model's dimensions as its Hugging Face config.json states them, typed and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_formats.config import read_config_dict
from mindspeed_llm.hf_config_checks import (
    DECODER_SIZES,
    EXPERT_SIZES,
    LATENT_SIZES,
    SUPPORTED_MODEL_TYPES,
    config_problems,
    dtype_name,
    rope_scaling,
)

if TYPE_CHECKING:
    import torch

    from megatron.core.parallel_layout import ParallelLayout
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class YarnScaling:
    """YaRN rope scaling (arXiv 2309.00071) under its config.json names."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True)
class HFModelConfig:
    """A decoder: latent attention and ``first_k_dense_replace`` dense layers before MoE layers (DeepSeek-V3, V2,
    Moonlight), or grouped-query attention with a norm on each head and dense layers only (Qwen3).

    Field names are config.json's. ``q_lora_rank`` None means that queries have one full projection (``q_proj``).
    ``moe_layer_freq`` m makes layer i a MoE layer when i >= first_k_dense_replace and i % m == 0. What the model type
    does not have is 0. ``mtp_num_layers`` is the caller's choice (``with_mtp``), not config.json's: how many of the
    checkpoint's ``num_nextn_predict_layers`` modules are built, loaded, trained and exported.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    n_routed_experts: int
    num_experts_per_tok: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    max_position_embeddings: int
    q_lora_rank: int | None
    n_shared_experts: int
    first_k_dense_replace: int
    moe_layer_freq: int
    n_group: int
    topk_group: int
    topk_method: str
    scoring_func: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: YarnScaling | None
    aux_loss_alpha: float
    initializer_range: float
    torch_dtype: str
    num_nextn_predict_layers: int
    quant_method: str | None
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool
    mtp_num_layers: int = 0

    @property
    def is_mla(self) -> bool:
        """Whether attention is latent; grouped-query attention otherwise."""
        return self.kv_lora_rank > 0

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head, position part included."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def shared_expert_intermediate_size(self) -> int:
        """Hidden width of the shared expert; 0 when there is none."""
        return self.n_shared_experts * self.moe_intermediate_size

    @property
    def has_expert_bias(self) -> bool:
        """Whether routers carry ``e_score_correction_bias`` (DeepSeek-V3's aux-loss-free balancing)."""
        return self.topk_method == "noaux_tc"

    def is_moe_layer(self, layer: int) -> bool:
        """Whether decoder layer ``layer`` has experts."""
        return self.n_routed_experts > 0 and layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    def with_mtp(self, mtp_num_layers: int) -> HFModelConfig:
        """This model with its first multi-token-prediction modules; ValueError when the checkpoint has fewer."""
        if not 0 <= mtp_num_layers <= self.num_nextn_predict_layers:
            raise ValueError(
                f"mtp_num_layers is {mtp_num_layers}; config.json says that the checkpoint has "
                f"num_nextn_predict_layers {self.num_nextn_predict_layers} of them"
            )
        return replace(self, mtp_num_layers=mtp_num_layers)


def load_hf_config(path: str | Path) -> HFModelConfig:
    """Read ``path`` (a config.json or the directory that holds one); every problem in one ValueError."""
    return parse_hf_config(read_config_dict(path), source=str(path))


def parse_hf_config(raw: Mapping[str, Any], source: str = "config") -> HFModelConfig:
    """Typed config from a config.json mapping; ``source`` is named in the error, which lists every problem."""
    model_type = raw.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ValueError(f"{source}: model_type is {model_type!r}; supported: {', '.join(SUPPORTED_MODEL_TYPES)}")
    problems = config_problems(raw)
    if problems:
        raise ValueError(f"{source} has {len(problems)} problem(s):\n" + "\n".join(f"  - {line}" for line in problems))
    is_v3, is_mla = model_type == "deepseek_v3", model_type != "qwen3"
    rope = raw.get("rope_parameters") or {}  # transformers >= 5 writes rope_theta and the scaling in here
    quantization = raw.get("quantization_config") or {}
    heads = raw["num_attention_heads"]
    return HFModelConfig(
        model_type=model_type,
        **{key: raw[key] for key in DECODER_SIZES},
        **{key: raw[key] if is_mla else 0 for key in LATENT_SIZES + EXPERT_SIZES},
        num_key_value_heads=heads if is_mla else raw["num_key_value_heads"],
        head_dim=0 if is_mla else raw.get("head_dim") or raw["hidden_size"] // heads,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        q_lora_rank=raw.get("q_lora_rank") or None,
        n_shared_experts=raw.get("n_shared_experts") or 0,
        first_k_dense_replace=raw.get("first_k_dense_replace", 0),
        moe_layer_freq=raw.get("moe_layer_freq", 1),
        n_group=raw.get("n_group") or 1,
        topk_group=raw.get("topk_group") or 1,
        topk_method=raw.get("topk_method") or ("noaux_tc" if is_v3 else "greedy"),
        scoring_func=raw.get("scoring_func") or ("sigmoid" if is_v3 else "softmax"),
        norm_topk_prob=bool(raw.get("norm_topk_prob", is_v3)),
        routed_scaling_factor=float(raw.get("routed_scaling_factor", 1.0)),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=float(raw.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        rope_scaling=_yarn(raw),
        aux_loss_alpha=float(raw.get("aux_loss_alpha") or 0.0),
        initializer_range=float(raw.get("initializer_range", 0.02)),
        torch_dtype=dtype_name(raw),
        num_nextn_predict_layers=raw.get("num_nextn_predict_layers") or 0,
        quant_method=quantization.get("quant_method"),
    )


def without_quantisation_and_mtp(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json that is right for plain BF16 weights without multi-token-prediction layers.

    ``quantization_config`` is dropped and ``num_nextn_predict_layers`` is 0; every other key stays as it was,
    ``topk_method`` and ``scoring_func`` among them.
    """
    cleaned = {key: value for key, value in config.items() if key != "quantization_config"}
    cleaned["num_nextn_predict_layers"] = 0
    return cleaned


def to_transformer_config(
    hf: HFModelConfig, *, params_dtype: torch.dtype, layout: ParallelLayout, **overrides: Any
) -> TransformerConfig:
    """The training engine's config of this model; ``overrides`` are its fields (e.g. recompute).

    An MLATransformerConfig for latent attention. ``sequence_parallel`` follows ``layout``: on exactly when tensor
    parallelism is.
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
        "rotary_base": hf.rope_theta,
    }
    if hf.n_routed_experts:
        fields |= _expert_fields(hf)
    if hf.is_mla:
        return MLATransformerConfig(**{**fields, **_latent_fields(hf), **overrides})
    return TransformerConfig(**{**fields, **_grouped_query_fields(hf), **overrides})


def _expert_fields(hf: HFModelConfig) -> dict[str, Any]:
    if hf.topk_method == "group_limited_greedy" and hf.n_group > 1 and hf.scoring_func != "softmax":
        raise ValueError(
            f"topk_method is 'group_limited_greedy' with scoring_func {hf.scoring_func!r}; the training engine ranks "
            "groups by their best expert for softmax scores only, and sigmoid ones by their two best, as 'noaux_tc'"
        )
    is_grouped = hf.n_group > 1 and hf.topk_method != "greedy"
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


def _grouped_query_fields(hf: HFModelConfig) -> dict[str, Any]:
    return {"num_query_groups": hf.num_key_value_heads, "kv_channels": hf.head_dim, "qk_layernorm": True}


def _latent_fields(hf: HFModelConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "q_lora_rank": hf.q_lora_rank,
        "kv_lora_rank": hf.kv_lora_rank,
        "qk_head_dim": hf.qk_nope_head_dim,  # Megatron's name for the part without position
        "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
        "v_head_dim": hf.v_head_dim,
        "max_position_embeddings": hf.max_position_embeddings,
    }
    yarn = hf.rope_scaling
    if yarn is None:
        return {**fields, "rope_type": "rope", "rotary_scaling_factor": 1.0}
    return {
        **fields,
        "rope_type": "yarn",
        "rotary_scaling_factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_max_position_embeddings,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale": yarn.mscale,
        "mscale_all_dim": yarn.mscale_all_dim,
    }


def _yarn(raw: Mapping[str, Any]) -> YarnScaling | None:
    scaling = rope_scaling(raw)
    if scaling is None:
        return None
    return YarnScaling(
        factor=float(scaling["factor"]),
        original_max_position_embeddings=int(scaling["original_max_position_embeddings"]),
        beta_fast=float(scaling.get("beta_fast", 32)),
        beta_slow=float(scaling.get("beta_slow", 1)),
        mscale=float(scaling.get("mscale", 1.0)),
        mscale_all_dim=float(scaling.get("mscale_all_dim", 0.0)),
    )

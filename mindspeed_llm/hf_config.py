"""The model's dimensions as its Hugging Face config.json states them, typed and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from megatron.core.parallel_layout import ParallelLayout
    from megatron.core.transformer.transformer_config import MLATransformerConfig

SUPPORTED_MODEL_TYPES = ("deepseek_v3", "deepseek_v2")
SUPPORTED_DTYPES = ("bfloat16", "float16", "float32")

_POSITIVE_INTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "n_routed_experts",
    "num_experts_per_tok",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "max_position_embeddings",
)


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
    """A DeepSeek-V3 family model: MLA attention, ``first_k_dense_replace`` dense layers, then MoE layers.

    Field names are config.json's. ``q_lora_rank`` None means that queries have one full projection (``q_proj``).
    ``moe_layer_freq`` m makes layer i a MoE layer when i >= first_k_dense_replace and i % m == 0.
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
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0


def load_hf_config(path: str | Path) -> HFModelConfig:
    """Read ``path`` (a config.json or the directory that holds one); every problem in one ValueError."""
    return parse_hf_config(read_config_dict(path), source=str(path))


def read_config_dict(path: str | Path) -> dict[str, Any]:
    """The raw config.json at ``path`` (file or directory)."""
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist; give a directory in Hugging Face form (config.json inside)") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{file} holds a JSON {type(raw).__name__}; expected an object of model dimensions")
    return raw


def parse_hf_config(raw: Mapping[str, Any], source: str = "config") -> HFModelConfig:
    """Typed config from a config.json mapping; ``source`` is named in the error, which lists every problem."""
    model_type = raw.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ValueError(f"{source}: model_type is {model_type!r}; supported: {', '.join(SUPPORTED_MODEL_TYPES)}")
    is_v3 = model_type == "deepseek_v3"
    problems = _problems(raw)
    if problems:
        raise ValueError(f"{source} has {len(problems)} problem(s):\n" + "\n".join(f"  - {line}" for line in problems))
    rope = raw.get("rope_parameters") or {}  # transformers >= 5 writes rope_theta and the scaling in here
    quantization = raw.get("quantization_config") or {}
    return HFModelConfig(
        model_type=model_type,
        **{key: raw[key] for key in _POSITIVE_INTS},
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
        torch_dtype=_dtype_name(raw),
        num_nextn_predict_layers=raw.get("num_nextn_predict_layers") or 0,
        quant_method=quantization.get("quant_method"),
    )


def without_quantisation_and_mtp(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json that is right for plain BF16 weights without the multi-token-prediction layer.

    ``quantization_config`` is dropped and ``num_nextn_predict_layers`` is 0; every other key stays as it was,
    ``topk_method`` and ``scoring_func`` among them.
    """
    cleaned = {key: value for key, value in config.items() if key != "quantization_config"}
    cleaned["num_nextn_predict_layers"] = 0
    return cleaned


def to_transformer_config(
    hf: HFModelConfig, *, params_dtype: torch.dtype, layout: ParallelLayout, **overrides: Any
) -> MLATransformerConfig:
    """The training engine's config of this model; ``overrides`` are MLATransformerConfig fields (e.g. recompute).

    ``sequence_parallel`` follows ``layout``: on exactly when tensor parallelism is.
    """
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    if hf.topk_method == "group_limited_greedy" and hf.n_group > 1:
        raise ValueError(
            "topk_method is 'group_limited_greedy' (groups ranked by their best expert); the training engine ranks "
            "groups by the sum of their two best scores, as 'noaux_tc' does; use such a model"
        )
    is_grouped = hf.n_group > 1
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
        "q_lora_rank": hf.q_lora_rank,
        "kv_lora_rank": hf.kv_lora_rank,
        "qk_head_dim": hf.qk_nope_head_dim,  # Megatron's name for the part without position
        "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
        "v_head_dim": hf.v_head_dim,
        **_rope_fields(hf),
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
    return MLATransformerConfig(**{**fields, **overrides})


def _rope_fields(hf: HFModelConfig) -> dict[str, Any]:
    fields = {"rotary_base": hf.rope_theta, "max_position_embeddings": hf.max_position_embeddings}
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


def _problems(raw: Mapping[str, Any]) -> list[str]:
    found = []
    for key in _POSITIVE_INTS:
        value = raw.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            found.append(f"{key} is {value!r}; a positive integer is needed" if key in raw else f"{key} is missing")
    for key in ("q_lora_rank", "n_shared_experts", "n_group", "topk_group", "num_nextn_predict_layers"):
        value = raw.get(key)
        if value is not None and (not _is_int(value) or value < 0):
            found.append(f"{key} is {value!r}; an integer or null is needed")
    for key, lowest in (("first_k_dense_replace", 0), ("moe_layer_freq", 1)):
        value = raw.get(key, lowest)
        if not isinstance(value, int) or value < lowest:
            found.append(f"{key} is {value!r}; an integer of at least {lowest} is needed")
    if raw.get("tie_word_embeddings"):
        found.append("tie_word_embeddings is true; only models with a separate lm_head are supported")
    if raw.get("attention_bias"):
        found.append("attention_bias is true; only bias-free attention is supported")
    if raw.get("scoring_func") not in (None, "sigmoid", "softmax"):
        found.append(f"scoring_func is {raw.get('scoring_func')!r}; sigmoid or softmax is needed")
    if raw.get("hidden_act", "silu") != "silu":
        found.append(f"hidden_act is {raw.get('hidden_act')!r}; only silu is supported")
    if _dtype_name(raw) not in SUPPORTED_DTYPES:
        found.append(f"torch_dtype is {_dtype_name(raw)!r}; one of {', '.join(SUPPORTED_DTYPES)} is needed")
    return found + _router_problems(raw) + _rope_problems(raw)


def _router_problems(raw: Mapping[str, Any]) -> list[str]:
    keys = ("n_routed_experts", "n_group", "num_experts_per_tok", "topk_group")
    values = [raw.get(key) or (1 if "group" in key else None) for key in keys]
    if not all(_is_int(value) for value in values):
        return []  # said above already
    experts, groups, topk, topk_group = (int(value or 0) for value in values)
    if experts % groups:
        return [f"n_routed_experts {experts} does not divide into n_group {groups}"]
    found = []
    if groups > 1 and experts // groups < 2:
        found.append(f"n_group {groups} leaves one expert a group; groups are ranked by their two best experts")
    if topk_group > groups:
        found.append(f"topk_group {topk_group} is larger than n_group {groups}")
    elif topk > experts // groups * topk_group:
        found.append(
            f"num_experts_per_tok {topk} exceeds the {experts // groups * topk_group} experts of {topk_group} groups"
        )
    return found


def _rope_problems(raw: Mapping[str, Any]) -> list[str]:
    scaling = _rope_scaling(raw)
    if scaling is None:
        return []
    kind = scaling.get("type") or scaling.get("rope_type")
    if kind != "yarn":
        return [f"rope_scaling type is {kind!r}; yarn or null is needed"]
    missing = [key for key in ("factor", "original_max_position_embeddings") if not scaling.get(key)]
    return [f"rope_scaling.{key} is missing" for key in missing]


def _rope_scaling(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters")
    if scaling is None or (scaling.get("rope_type") == "default" and "type" not in scaling):
        return None
    return scaling


def _yarn(raw: Mapping[str, Any]) -> YarnScaling | None:
    scaling = _rope_scaling(raw)
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


def _dtype_name(raw: Mapping[str, Any]) -> str:
    return str(raw.get("torch_dtype") or raw.get("dtype") or "bfloat16").removeprefix("torch.")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

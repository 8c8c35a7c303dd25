"""A model's dimensions as its Hugging Face config.json gives them, typed and checked, without remote code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_formats.config_checks import DECODER_SIZES, EXPERT_SIZES, LATENT_SIZES, config_problems, dtype_name
from hf_formats.families import FAMILIES, model_family
from hf_formats.problems import raise_problems
from hf_formats.rope import RopeConfig, parse_rope


@dataclass(frozen=True)
class HFModelConfig:
    """A decoder: latent attention and ``first_k_dense_replace`` dense layers before MoE layers (DeepSeek-V3, V2,
    Moonlight), or grouped-query attention with a norm on each head and dense layers only (Qwen3).

    Field names are config.json's. ``q_lora_rank`` None means that queries have one full projection (``q_proj``).
    ``moe_layer_freq`` m makes layer i a MoE layer when i >= first_k_dense_replace and i % m == 0. Sizes that the
    model type does not have are 0. ``mtp_num_layers`` is the caller's choice (``with_mtp``), not config.json's: the
    number of the checkpoint's ``num_nextn_predict_layers`` modules that are built, loaded, trained and exported.
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
    rope: RopeConfig
    aux_loss_alpha: float
    initializer_range: float
    torch_dtype: str
    num_nextn_predict_layers: int
    quant_method: str | None
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool
    architecture: str
    eos_token_ids: tuple[int, ...] = ()
    mtp_num_layers: int = 0

    @property
    def is_mla(self) -> bool:
        """Whether attention is latent; grouped-query attention otherwise."""
        return self.kv_lora_rank > 0

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head, with its rotary part."""
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

    @property
    def num_moe_layers(self) -> int:
        """Number of decoder layers that have experts."""
        return sum(map(self.is_moe_layer, range(self.num_hidden_layers)))

    def with_mtp(self, mtp_num_layers: int) -> HFModelConfig:
        """This model with its first multi-token-prediction modules; ValueError when the checkpoint has fewer."""
        if not 0 <= mtp_num_layers <= self.num_nextn_predict_layers:
            raise ValueError(
                f"mtp_num_layers is {mtp_num_layers}; config.json says that the checkpoint has "
                f"num_nextn_predict_layers {self.num_nextn_predict_layers} of them"
            )
        return replace(self, mtp_num_layers=mtp_num_layers)


def load_hf_config(path: str | Path) -> HFModelConfig:
    """Read ``path``, a config.json or its directory; one ValueError lists every problem."""
    return parse_hf_config(read_config_dict(path), source=str(config_file(path)))


def config_file(path: str | Path) -> Path:
    """Return the config.json at ``path``, which is the file itself or its directory."""
    return Path(path) / "config.json" if Path(path).is_dir() else Path(path)


def read_config_dict(path: str | Path) -> dict[str, Any]:
    """Return the content of the config.json at ``path`` (file or directory)."""
    file = config_file(path)
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist; give a directory in Hugging Face form (config.json inside)") from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or not JSON
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{file} holds a JSON {type(raw).__name__}; expected an object of model dimensions")
    return raw


def parse_hf_config(raw: Mapping[str, Any], source: str = "config") -> HFModelConfig:
    """Return the typed config of a config.json's content; the error names ``source`` and lists every problem."""
    model_type = model_family(raw, source)
    raise_problems(source, config_problems(raw, model_type))
    raw = {key: value for key, value in raw.items() if value is not None}
    is_v3, is_mla = model_type == "deepseek_v3", model_type != "qwen3"
    quantization = raw.get("quantization_config") or {}
    heads, eos = raw["num_attention_heads"], raw.get("eos_token_id", ())
    topk_method = raw.get("topk_method") or ("noaux_tc" if is_v3 else "greedy")
    has_groups = topk_method != "greedy"  # a greedy choice is among all experts, whatever the groups
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
        n_group=(has_groups and raw.get("n_group")) or 1,
        topk_group=(has_groups and raw.get("topk_group")) or 1,
        topk_method=topk_method,
        scoring_func=raw.get("scoring_func") or ("sigmoid" if is_v3 else "softmax"),
        norm_topk_prob=bool(raw.get("norm_topk_prob", is_v3)),
        routed_scaling_factor=float(raw.get("routed_scaling_factor", 1.0)),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=parse_rope(raw),
        aux_loss_alpha=float(raw.get("aux_loss_alpha") or 0.0),
        initializer_range=float(raw.get("initializer_range", 0.02)),
        torch_dtype=dtype_name(raw),
        num_nextn_predict_layers=raw.get("num_nextn_predict_layers") or 0,
        quant_method=quantization.get("quant_method"),
        architecture=FAMILIES[model_type],
        eos_token_ids=tuple(eos) if isinstance(eos, list | tuple) else (int(eos),),
    )


def without_quantisation_and_mtp(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of plain weights without multi-token-prediction layers.

    ``quantization_config`` is dropped and ``num_nextn_predict_layers`` is 0; every other key stays as it was.
    """
    cleaned = {key: value for key, value in config.items() if key != "quantization_config"}
    cleaned["num_nextn_predict_layers"] = 0
    return cleaned

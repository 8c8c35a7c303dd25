"""The model's config.json, read directly and typed (no remote code, no transformers import)."""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

SUPPORTED_ARCHITECTURES = ("DeepseekV3ForCausalLM",)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding parameters; `factor` 1 with rope_type "default" means no scaling."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True)
class DeepseekV3Config:
    """What the engine reads of a `deepseek_v3` config.json, under HF's key names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    n_shared_experts: int
    n_routed_experts: int
    routed_scaling_factor: float
    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    n_group: int
    topk_group: int
    num_experts_per_tok: int
    first_k_dense_replace: int
    max_position_embeddings: int
    rope: RopeConfig
    q_lora_rank: int | None = None
    norm_topk_prob: bool = True
    rms_norm_eps: float = 1e-6
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()


def load_config(model_dir: str) -> DeepseekV3Config:
    """Read `model_dir`/config.json; ValueError lists every key that is missing or that this engine cannot honour."""
    path = Path(model_dir) / "config.json"
    if not path.is_file():
        raise ValueError(f"model={model_dir}: {path} does not exist; expected a Hugging Face model directory")
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    problems = _unsupported(raw)
    names = {f.name for f in fields(DeepseekV3Config)} - {"rope", "dtype", "eos_token_ids"}
    required = {f.name for f in fields(DeepseekV3Config) if f.default is MISSING} - {"rope"}
    problems += [f"{name} is missing" for name in sorted(required - raw.keys())]
    if problems:
        raise ValueError(f"{path} cannot be used:\n" + "\n".join(f"  - {p}" for p in problems))
    eos = raw.get("eos_token_id")
    return DeepseekV3Config(
        **{name: raw[name] for name in names if name in raw},
        rope=_rope(raw),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),),
    )


def _unsupported(raw: dict[str, Any]) -> list[str]:
    """What of a config this engine's DeepSeek-V3 does not do."""
    problems = []
    architecture = (raw.get("architectures") or ["(none)"])[0]
    if architecture not in SUPPORTED_ARCHITECTURES:
        problems.append(f"architectures[0]={architecture} is unknown; known: {', '.join(SUPPORTED_ARCHITECTURES)}")
    if raw.get("quantization_config"):
        problems.append(
            "quantization_config is present: convert the weights first (python -m mindspeed_llm.fp8_cast_bf16)"
        )
    expected = {
        "hidden_act": "silu",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "rope_interleave": True,
        "moe_layer_freq": 1,
    }
    problems += [
        f"{key}={raw[key]!r} is not supported, expected {value!r}"
        for key, value in expected.items()
        if raw.get(key, value) != value
    ]
    rope_type = _rope_parameters(raw).get("rope_type", "default")
    if rope_type not in ("default", "yarn"):
        problems.append(f"rope type {rope_type!r} is not supported, expected default or yarn")
    return problems


def _rope_parameters(raw: dict[str, Any]) -> dict[str, Any]:
    """Rope settings under the names of transformers 5 (`rope_parameters`), from either generation of config.json."""
    parameters = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    parameters.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    return parameters


def _rope(raw: dict[str, Any]) -> RopeConfig:
    parameters = _rope_parameters(raw)
    parameters.setdefault("original_max_position_embeddings", raw["max_position_embeddings"])
    names = {f.name for f in fields(RopeConfig)}
    return RopeConfig(**{name: value for name, value in parameters.items() if name in names and value is not None})

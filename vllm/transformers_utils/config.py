"""The model's config.json, read directly and typed (no remote code, no transformers import)."""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from vllm.transformers_utils.config_checks import SUPPORTED_MODEL_TYPES, config_problems, rope_parameters


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
    """What the engine reads of a `deepseek_v3` or `deepseek_v2` config.json, under HF's key names: latent attention,
    `first_k_dense_replace` dense layers, then mixtures of experts.

    scoring_func "sigmoid": a correction bias steers the choice, a group counts as its two best experts (V3, Moonlight);
    "softmax": no bias, a group counts as its best expert (V2).
    """

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
    num_experts_per_tok: int
    first_k_dense_replace: int
    max_position_embeddings: int
    rope: RopeConfig
    architecture: str = "DeepseekV3ForCausalLM"
    n_group: int = 1
    topk_group: int = 1
    q_lora_rank: int | None = None
    scoring_func: str = "sigmoid"
    norm_topk_prob: bool = True
    rms_norm_eps: float = 1e-6
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()
    tie_word_embeddings: ClassVar[bool] = False

    @property
    def num_moe_layers(self) -> int:
        return self.num_hidden_layers - self.first_k_dense_replace

    @property
    def rope_dim(self) -> int:
        """Channels that rotary positions turn."""
        return self.qk_rope_head_dim

    def kv_values_per_token(self, tp: int) -> int:
        """Values that one layer of a TP rank keeps of a token: every rank has the whole latent."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def tp_problems(self, tp: int) -> list[str]:
        """Why the model cannot be split over `tp` ranks."""
        return _indivisible(
            {
                "num_attention_heads": self.num_attention_heads,
                "vocab_size": self.vocab_size,
                "intermediate_size": self.intermediate_size,
                # shared experts, and routed ones without expert parallel
                "moe_intermediate_size": self.moe_intermediate_size,
            },
            tp,
        )


@dataclass(frozen=True)
class Qwen3Config:
    """What the engine reads of a `qwen3` config.json, under HF's key names: grouped-query attention with a norm on each
    head, dense layers only.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: RopeConfig
    architecture: str = "Qwen3ForCausalLM"
    tie_word_embeddings: bool = False
    rms_norm_eps: float = 1e-6
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()
    n_routed_experts: ClassVar[int] = 0
    num_experts_per_tok: ClassVar[int] = 0
    num_moe_layers: ClassVar[int] = 0

    @property
    def rope_dim(self) -> int:
        """Channels that rotary positions turn."""
        return self.head_dim

    def kv_heads_of_rank(self, tp: int) -> int:
        """Heads of keys and values on a TP rank; with more ranks than heads, several ranks hold the same one."""
        return max(1, self.num_key_value_heads // tp)

    def kv_values_per_token(self, tp: int) -> int:
        """Values that one layer of a TP rank keeps of a token."""
        return 2 * self.kv_heads_of_rank(tp) * self.head_dim

    def tp_problems(self, tp: int) -> list[str]:
        """Why the model cannot be split over `tp` ranks."""
        problems = _indivisible(
            {
                "num_attention_heads": self.num_attention_heads,
                "vocab_size": self.vocab_size,
                "intermediate_size": self.intermediate_size,
            },
            tp,
        )
        heads = self.num_key_value_heads
        if heads % tp and tp % heads:
            problems.append(f"num_key_value_heads={heads} neither divides by tensor_parallel_size={tp} nor divides it")
        return problems


HFConfig: TypeAlias = DeepseekV3Config | Qwen3Config


def load_config(model_dir: str) -> HFConfig:
    """Read `model_dir`/config.json; ValueError lists every key that is missing or that this engine cannot honour."""
    path = Path(model_dir) / "config.json"
    if not path.is_file():
        raise ValueError(f"model={model_dir}: {path} does not exist; expected a Hugging Face model directory")
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    problems = config_problems(raw)
    kind = Qwen3Config if _model_type(raw) == "qwen3" else DeepseekV3Config
    raw = _with_implied(raw, kind)
    required = {f.name for f in fields(kind) if f.default is MISSING} - {"rope"}
    problems += [f"{name} is missing" for name in sorted(required) if raw.get(name) is None]
    if problems:
        raise ValueError(f"{path} cannot be used:\n" + "\n".join(f"  - {p}" for p in problems))
    eos = raw.get("eos_token_id")
    names = {f.name for f in fields(kind)} - {"rope", "dtype", "eos_token_ids", "architecture"}
    return kind(
        **{name: raw[name] for name in names if raw.get(name) is not None},
        rope=_rope(raw),
        architecture=raw["architectures"][0],
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),),
    )


def _model_type(raw: dict[str, Any]) -> str:
    return SUPPORTED_MODEL_TYPES.get((raw.get("architectures") or [""])[0], "deepseek_v3")


def _with_implied(raw: dict[str, Any], kind: type[HFConfig]) -> dict[str, Any]:
    """`raw` with what a config.json of its model type may leave out."""
    if kind is Qwen3Config:
        hidden, heads = raw.get("hidden_size"), raw.get("num_attention_heads")
        return {"head_dim": hidden // heads if hidden and heads else None} | _present(raw)
    implied: dict[str, Any] = {"n_shared_experts": 0}
    if _model_type(raw) == "deepseek_v2":
        implied |= {"scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0}
    found = implied | _present(raw)
    if found.get("topk_method") == "greedy":  # of all experts, whatever the groups
        found |= {"n_group": 1, "topk_group": 1}
    return found


def _present(raw: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if value is not None}


def _indivisible(sizes: dict[str, int], tp: int) -> list[str]:
    return [f"{name}={size} does not divide by tensor_parallel_size={tp}" for name, size in sizes.items() if size % tp]


def _rope(raw: dict[str, Any]) -> RopeConfig:
    parameters = rope_parameters(raw)
    parameters.setdefault("original_max_position_embeddings", raw["max_position_embeddings"])
    names = {f.name for f in fields(RopeConfig)}
    return RopeConfig(**{name: value for name, value in parameters.items() if name in names and value is not None})

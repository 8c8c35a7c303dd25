"""A tiny random DeepSeek-V3 checkpoint in Hugging Face form, and its logits by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

TINY: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "max_position_embeddings": 640,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 10.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "attention_bias": False,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "eos_token_id": 1,
    "bos_token_id": 0,
    "torch_dtype": "float32",
}


def hf_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint, without the copies that prediction layers have of embedding and head."""
    h, heads = config["hidden_size"], config["num_attention_heads"]
    qk = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    lora, rope, value = config["kv_lora_rank"], config["qk_rope_head_dim"], config["v_head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], h)}
    num_layers = config["num_hidden_layers"]
    for layer in range(num_layers + config.get("num_nextn_predict_layers", 0)):
        prefix = f"model.layers.{layer}"
        if layer >= num_layers:
            shapes |= {f"{prefix}.{name}.weight": (h,) for name in ("enorm", "hnorm", "shared_head.norm")}
            shapes[f"{prefix}.eh_proj.weight"] = (h, 2 * h)
        attention, q_rank = f"{prefix}.self_attn", config["q_lora_rank"]
        if q_rank is None:
            shapes[f"{attention}.q_proj.weight"] = (heads * qk, h)
        else:
            shapes[f"{attention}.q_a_proj.weight"] = (q_rank, h)
            shapes[f"{attention}.q_a_layernorm.weight"] = (q_rank,)
            shapes[f"{attention}.q_b_proj.weight"] = (heads * qk, q_rank)
        shapes[f"{attention}.kv_a_proj_with_mqa.weight"] = (lora + rope, h)
        shapes[f"{attention}.kv_a_layernorm.weight"] = (lora,)
        shapes[f"{attention}.kv_b_proj.weight"] = (heads * (config["qk_nope_head_dim"] + value), lora)
        shapes[f"{attention}.o_proj.weight"] = (h, heads * value)
        shapes[f"{prefix}.input_layernorm.weight"] = (h,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (h,)
        mlps = {f"{prefix}.mlp": config["intermediate_size"]}
        if layer >= config["first_k_dense_replace"]:
            width = config["moe_intermediate_size"]
            mlps = {f"{prefix}.mlp.experts.{e}": width for e in range(config["n_routed_experts"])}
            mlps[f"{prefix}.mlp.shared_experts"] = width * config["n_shared_experts"]
            shapes[f"{prefix}.mlp.gate.weight"] = (config["n_routed_experts"], h)
            shapes[f"{prefix}.mlp.gate.e_score_correction_bias"] = (config["n_routed_experts"],)
        for name, width in mlps.items():
            shapes |= {f"{name}.gate_proj.weight": (width, h), f"{name}.up_proj.weight": (width, h)}
            shapes[f"{name}.down_proj.weight"] = (h, width)
    return shapes | {"model.norm.weight": (h,), "lm_head.weight": (config["vocab_size"], h)}


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Weights lively enough that routing, positions and the correction bias all matter."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in hf_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            weights[name] = 1 + 0.1 * noise
        elif name.endswith("bias"):
            weights[name] = 0.1 * noise
        elif name.endswith("embed_tokens.weight"):
            weights[name] = noise
        else:
            weights[name] = noise * (1.5 if "gate.weight" in name else 1.0) / shape[-1] ** 0.5
    return weights


def write_checkpoint(path: Path, seed: int = 0, shards: int = 2, **overrides: Any) -> str:
    """Write a checkpoint directory; returns its path."""
    config = TINY | overrides
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    weights = random_weights(config, seed)
    names = list(weights)
    index: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return str(path)


def hf_model(path: str) -> Any:
    """transformers' model of the checkpoint, fp32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def hf_logits(model: Any, sequences: list[list[int]]) -> list[Tensor]:
    """fp32 [len, vocab] logits of each sequence, from one right-padded batch (causal, so padding changes nothing)."""
    longest = max(map(len, sequences))
    ids = torch.tensor([s + [0] * (longest - len(s)) for s in sequences])
    logits = model(input_ids=ids, use_cache=False).logits
    return [logits[i, : len(s)] for i, s in enumerate(sequences)]

"""Tiny configs of every model family and random checkpoints in Hugging Face form for tests of every package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hf_formats.config import parse_hf_config
from mindspeed_llm.hf_shapes import hf_tensors, shared_copies


def tiny_hf_config(**overrides: Any) -> dict[str, Any]:
    """config.json of a 3-layer DeepSeek-V3 (one dense layer, 8 experts in 4 groups, q-LoRA, YaRN); no FP8, no MTP."""
    config: dict[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 128,
        "kv_lora_rank": 16,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 32,
        "moe_layer_freq": 1,
        "n_group": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0,
        "pretraining_tp": 1,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 1024,
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "torch_dtype": "float32",
        "use_cache": True,
        "v_head_dim": 16,
        "vocab_size": 128,
    }
    return {**config, **overrides}


def tiny_moonlight_config(**overrides: Any) -> dict[str, Any]:
    """Moonlight's form of DeepSeek-V3: no q-LoRA, plain rotary positions, one expert group, two shared experts."""
    moonlight = {
        "q_lora_rank": None,
        "rope_scaling": None,
        "rope_theta": 50000.0,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 2.446,
    }
    return tiny_hf_config(**{**moonlight, **overrides})


def tiny_v2_lite_config(**overrides: Any) -> dict[str, Any]:
    """DeepSeek-V2-Lite: no q-LoRA, YaRN with mscale 0.707, softmax weights as they are, no groups, no bias."""
    v2_lite = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "rope_scaling": {**tiny_hf_config()["rope_scaling"], "mscale": 0.707, "mscale_all_dim": 0.707},
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_method": "greedy",
    }
    return tiny_hf_config(**{**v2_lite, **overrides})


def tiny_decoder_config(**overrides: Any) -> dict[str, Any]:
    """What grouped-query models have in common: 3 layers, 4 query heads on 2 heads of keys and values."""
    config = {
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "max_position_embeddings": 4096,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": 128,
    }
    return config | overrides


def tiny_qwen3_config(**overrides: Any) -> dict[str, Any]:
    """A dense Qwen3, whose head size is not hidden / heads."""
    qwen3 = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 24,
        "max_window_layers": 3,
        "rope_theta": 1000000,
        "sliding_window": None,
        "use_sliding_window": False,
    }
    return tiny_decoder_config(**{**qwen3, **overrides})


def tiny_weights(config: dict[str, Any], seed: int = 0, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Random weights under HF names: matrices N(0, 1/fan_in), norms near 1, a non-zero fp32 correction bias."""
    hf = parse_hf_config(config)
    hf = hf.with_mtp(hf.num_nextn_predict_layers)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, (shape, dtype_name) in hf_tensors(hf).items():
        noise = torch.randn(shape, generator=generator)
        target = getattr(torch, dtype_name) if dtype is None else dtype
        if name.endswith("e_score_correction_bias"):
            weights[name] = 0.1 * noise
        elif name.endswith(".bias"):
            weights[name] = (0.1 * noise).to(target)
        elif len(shape) == 1:
            weights[name] = (1 + 0.1 * noise).to(target)
        else:
            weights[name] = (noise * shape[-1] ** -0.5).to(target)
    for name, original in shared_copies(hf).items():
        weights[name] = weights[original].clone()
    return weights


def write_tiny_checkpoint(
    path: str | Path,
    config: dict[str, Any] | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    num_shards: int = 2,
) -> dict[str, torch.Tensor]:
    """Write config.json, ``num_shards`` safetensors files and the index to ``path``; returns the weights.

    ``dtype`` (default: the config's torch_dtype) is also what the written config.json says.
    """
    config = dict(tiny_hf_config() if config is None else config)
    if dtype is not None:
        config["torch_dtype"] = str(dtype).removeprefix("torch.")
    out = Path(path)
    out.mkdir(parents=True, exist_ok=True)
    weights = tiny_weights(config, seed, dtype)
    names = list(weights)
    weight_map = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = names[shard * len(names) // num_shards : (shard + 1) * len(names) // num_shards]
        save_file({name: weights[name] for name in part}, out / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file_name))
    total = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (out / "config.json").write_text(json.dumps(config, indent=2))
    return weights

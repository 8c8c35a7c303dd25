"""A tiny DeepSeek-V3 with several FP8 blocks to a weight, none of them fitting, and its checkpoint in FP8."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hf_formats.fp8 import QUANTIZATION_CONFIG, SCALE_SUFFIX, Fp8Blocks, dequantize, is_quantized, quantize
from tests.vllm.tiny import TINY, random_weights

WIDE: dict[str, Any] = TINY | {
    "hidden_size": 200,
    "intermediate_size": 288,
    "moe_intermediate_size": 144,
    "num_hidden_layers": 2,
    "kv_lora_rank": 144,
    "q_lora_rank": 160,
}
# Whole blocks along the inputs of every product: those that FP8 products take.
ALIGNED: dict[str, Any] = TINY | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
    "v_head_dim": 32,
}


def fp8_tensors(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the FP8 checkpoint of `weights`, by the converter's arithmetic."""
    stored = {}
    for name, weight in weights.items():
        if is_quantized(name):
            stored[name], stored[name + SCALE_SUFFIX], _ = quantize(weight)
        else:
            stored[name] = weight
    return stored


def dequantized(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The plain tensors, fp32, that an FP8 checkpoint stands for."""
    plain = {name: weight for name, weight in stored.items() if not name.endswith(SCALE_SUFFIX)}
    for name in filter(is_quantized, list(plain)):
        plain[name] = dequantize(Fp8Blocks(plain[name], stored[name + SCALE_SUFFIX]), torch.float32)
    return plain


def write_directory(
    path: Path, tensors: dict[str, Tensor], shards: int = 3, config: dict[str, Any] | None = None
) -> str:
    """A checkpoint directory; a weight and its scale may lie in different shards."""
    path.mkdir(parents=True, exist_ok=True)
    is_fp8 = any(name.endswith(SCALE_SUFFIX) for name in tensors)
    extra = {"quantization_config": QUANTIZATION_CONFIG} if is_fp8 else {}
    (path / "config.json").write_text(json.dumps((config or WIDE) | extra))
    names, index = list(tensors), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name].contiguous() for name in names[shard::shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return str(path)


def wide_weights(seed: int = 0) -> dict[str, Tensor]:
    """Random weights with a block of zeros and one of tiny values."""
    weights = random_weights(WIDE, seed)
    weights["model.layers.1.mlp.experts.3.up_proj.weight"][:128, :128] = 0
    weights["model.layers.0.self_attn.o_proj.weight"][128:, :] = 1e-40
    return weights

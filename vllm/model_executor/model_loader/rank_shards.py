"""The shards of Hugging Face tensors that a rank of an engine owns: a pure function of config and layout.

They equal what the layers' `weight_views` of a built model say, for every rank and without a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TypeAlias

import torch

from hf_formats.fp8 import FP8_DTYPE, SCALE_SUFFIX, is_quantized, num_blocks, touched
from vllm.config import ParallelConfig, VllmConfig
from vllm.model_executor.model_loader.weight_view import Ranges, Shard
from vllm.transformers_utils.config import DeepseekV3Config, HFConfig, Qwen3Config

Shape: TypeAlias = tuple[int, ...]
RankShards: TypeAlias = Mapping[str, Shard]
"""Hugging Face name -> what a rank owns of it."""
_Split: TypeAlias = tuple[str, Shape, int | None]  # name, whole shape, dimension that TP splits


def engine_shards(config: VllmConfig, rank: int) -> RankShards:
    """Hugging Face name -> what rank `rank` of an engine of this configuration owns of it."""
    model = config.model
    parallel = replace(config.parallel, rank=rank)
    return rank_shards(model.hf, parallel, getattr(torch, model.dtype), model.quantization)


def rank_shards(
    hf: HFConfig, parallel: ParallelConfig, dtype: torch.dtype, quantization: str | None = None
) -> dict[str, Shard]:
    """Hugging Face name -> what rank `parallel.rank` owns of it.

    With quantization "fp8" a quantised weight is followed by the scales of the blocks that its shard touches.
    """
    tp, is_fp8 = parallel.tensor_parallel_size, quantization == "fp8"
    dense = _dense_shards(hf, parallel.rank % tp, tp, dtype, is_fp8, parallel.shares_tokens)
    return dense | dict(_expert_shards(hf, parallel, dtype, is_fp8))


def _with_scales(
    name: str, shape: Shape, ranges: Ranges, dtype: torch.dtype, is_fp8: bool
) -> Iterator[tuple[str, Shard]]:
    if is_fp8 and is_quantized(name):
        yield name, Shard(shape, ranges, FP8_DTYPE)
        blocks = tuple(touched(start, stop) for start, stop in ranges)
        yield name + SCALE_SUFFIX, Shard(tuple(map(num_blocks, shape)), blocks, torch.float32)
    else:
        yield name, Shard(shape, ranges, torch.float32 if ".mlp.gate." in name else dtype)


@lru_cache(maxsize=64)
def _dense_shards(
    hf: HFConfig, tp_rank: int, tp: int, dtype: torch.dtype, is_fp8: bool, shares_tokens: bool
) -> dict[str, Shard]:
    """The shards of everything but routed experts, which are the same on every replica.

    shares_tokens: see ``ParallelConfig``; shared experts are then whole.
    """
    shards: dict[str, Shard] = {}
    for name, shape, dim in _dense_tensors(hf):
        if isinstance(hf, Qwen3Config) and name.endswith(("k_proj.weight", "v_proj.weight")):
            ranges = _kv_heads(hf, tp_rank, tp)
        else:
            is_whole = shares_tokens and ".shared_experts." in name
            ranges = _ranges(shape, None if is_whole else dim, tp_rank, tp)
        shards.update(_with_scales(name, shape, ranges, dtype, is_fp8))
    return shards


def _expert_shards(
    hf: HFConfig, parallel: ParallelConfig, dtype: torch.dtype, is_fp8: bool
) -> Iterator[tuple[str, Shard]]:
    """Whole experts with expert parallelism, otherwise the same part of the width of each expert."""
    if not isinstance(hf, DeepseekV3Config):
        return
    ep, tp = parallel.expert_parallel_size, parallel.tensor_parallel_size
    ways = 1 if parallel.enable_expert_parallel else tp
    prefix = f"model.layers.{hf.first_k_dense_replace}.mlp.experts.0"
    parts: list[tuple[str, Shard]] = []
    for name, shape, dim in _mlp(prefix, hf.hidden_size, hf.moe_intermediate_size):
        parts += _with_scales(name, shape, _ranges(shape, dim, parallel.rank % ways, ways), dtype, is_fp8)
    first, stop = _part(hf.n_routed_experts, parallel.rank % ep, ep)
    names = _expert_names(hf, tuple(name.removeprefix(prefix) for name, _ in parts))
    shards = [shard for _, shard in parts] * (stop - first)
    for names_of_layer in names:
        yield from zip(names_of_layer[first * len(parts) : stop * len(parts)], shards, strict=True)


@lru_cache(maxsize=4)
def _expert_names(hf: DeepseekV3Config, suffixes: tuple[str, ...]) -> list[list[str]]:
    """The names of each MoE layer's expert tensors, expert by expert; made once for all ranks."""
    return [
        [
            f"model.layers.{layer}.mlp.experts.{expert}{suffix}"
            for expert in range(hf.n_routed_experts)
            for suffix in suffixes
        ]
        for layer in range(hf.first_k_dense_replace, hf.num_hidden_layers)
    ]


def _dense_tensors(hf: HFConfig) -> Iterator[_Split]:
    yield "model.embed_tokens.weight", (hf.vocab_size, hf.hidden_size), 0
    for layer in range(hf.num_hidden_layers):
        for name, shape, dim in _deepseek(hf, layer) if isinstance(hf, DeepseekV3Config) else _qwen3(hf):
            yield f"model.layers.{layer}.{name}", shape, dim
    yield "model.norm.weight", (hf.hidden_size,), None
    if not hf.tie_word_embeddings:
        yield "lm_head.weight", (hf.vocab_size, hf.hidden_size), 0


def _deepseek(hf: DeepseekV3Config, layer: int) -> Iterator[_Split]:
    hidden, heads = hf.hidden_size, hf.num_attention_heads
    query_rows = heads * (hf.qk_nope_head_dim + hf.qk_rope_head_dim)
    yield "input_layernorm.weight", (hidden,), None
    if hf.q_lora_rank is None:
        yield "self_attn.q_proj.weight", (query_rows, hidden), 0
    else:
        yield "self_attn.q_a_proj.weight", (hf.q_lora_rank, hidden), None
        yield "self_attn.q_a_layernorm.weight", (hf.q_lora_rank,), None
        yield "self_attn.q_b_proj.weight", (query_rows, hf.q_lora_rank), 0
    yield "self_attn.kv_a_proj_with_mqa.weight", (hf.kv_lora_rank + hf.qk_rope_head_dim, hidden), None
    yield "self_attn.kv_a_layernorm.weight", (hf.kv_lora_rank,), None
    yield "self_attn.kv_b_proj.weight", (heads * (hf.qk_nope_head_dim + hf.v_head_dim), hf.kv_lora_rank), 0
    yield "self_attn.o_proj.weight", (hidden, heads * hf.v_head_dim), 1
    yield "post_attention_layernorm.weight", (hidden,), None
    if layer < hf.first_k_dense_replace:
        yield from _mlp("mlp", hidden, hf.intermediate_size)
        return
    yield "mlp.gate.weight", (hf.n_routed_experts, hidden), None
    if hf.scoring_func == "sigmoid":
        yield "mlp.gate.e_score_correction_bias", (hf.n_routed_experts,), None
    if hf.n_shared_experts:
        yield from _mlp("mlp.shared_experts", hidden, hf.moe_intermediate_size * hf.n_shared_experts)


def _qwen3(hf: Qwen3Config) -> Iterator[_Split]:
    hidden, query_rows = hf.hidden_size, hf.num_attention_heads * hf.head_dim
    yield "input_layernorm.weight", (hidden,), None
    yield "self_attn.q_proj.weight", (query_rows, hidden), 0
    for kind in "kv":
        yield f"self_attn.{kind}_proj.weight", (hf.num_key_value_heads * hf.head_dim, hidden), 0
    yield "self_attn.q_norm.weight", (hf.head_dim,), None
    yield "self_attn.k_norm.weight", (hf.head_dim,), None
    yield "self_attn.o_proj.weight", (hidden, query_rows), 1
    yield "post_attention_layernorm.weight", (hidden,), None
    yield from _mlp("mlp", hidden, hf.intermediate_size)


def _mlp(prefix: str, hidden: int, width: int) -> Iterator[_Split]:
    yield f"{prefix}.gate_proj.weight", (width, hidden), 0
    yield f"{prefix}.up_proj.weight", (width, hidden), 0
    yield f"{prefix}.down_proj.weight", (hidden, width), 1


def _kv_heads(hf: Qwen3Config, tp_rank: int, tp: int) -> Ranges:
    """With more ranks than key-value heads, neighbouring ranks own the same head."""
    num_copies = max(1, tp // hf.num_key_value_heads)
    rows = _part(hf.num_key_value_heads * hf.head_dim, tp_rank // num_copies, tp // num_copies)
    return rows, (0, hf.hidden_size)


def _ranges(shape: Shape, dim: int | None, index: int, ways: int) -> Ranges:
    return tuple(_part(size, index, ways) if axis == dim else (0, size) for axis, size in enumerate(shape))


def _part(size: int, index: int, ways: int) -> tuple[int, int]:
    part = size // ways
    return index * part, (index + 1) * part

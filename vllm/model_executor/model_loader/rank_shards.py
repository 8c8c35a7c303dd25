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
from hf_formats.layer_tensors import LayerTensor, Split, layer_tensors, mlp_tensors, mtp_own_tensors
from hf_formats.ranges import Ranges
from vllm.config import ParallelConfig, VllmConfig
from vllm.model_executor.model_loader.weight_view import WeightView
from vllm.transformers_utils.config import HFConfig

Shape: TypeAlias = tuple[int, ...]
RankShards: TypeAlias = Mapping[str, WeightView]
"""Hugging Face name -> what a rank owns of it, without its memory."""


def engine_shards(config: VllmConfig, rank: int) -> RankShards:
    """Hugging Face name -> what rank `rank` of an engine of this configuration owns of it."""
    model = config.model
    parallel = replace(config.parallel, rank=rank)
    return rank_shards(model.hf, parallel, getattr(torch, model.dtype), model.quantization)


def rank_shards(
    hf: HFConfig, parallel: ParallelConfig, dtype: torch.dtype, quantization: str | None = None
) -> dict[str, WeightView]:
    """Hugging Face name -> what rank `parallel.rank` owns of it.

    With quantization "fp8" a quantised weight is followed by the scales of the blocks that its shard touches.
    """
    tp, is_fp8 = parallel.tensor_parallel_size, quantization == "fp8"
    dense = _dense_shards(hf, parallel.rank % tp, tp, dtype, is_fp8, parallel.shares_tokens)
    return dense | dict(_expert_shards(hf, parallel, dtype, is_fp8))


def _with_scales(
    name: str, shape: Shape, ranges: Ranges, dtype: torch.dtype, is_fp8: bool
) -> Iterator[tuple[str, WeightView]]:
    if is_fp8 and is_quantized(name):
        yield name, WeightView(shape, ranges, FP8_DTYPE)
        blocks = tuple(touched(start, stop) for start, stop in ranges)
        yield name + SCALE_SUFFIX, WeightView(tuple(map(num_blocks, shape)), blocks, torch.float32)
    else:
        yield name, WeightView(shape, ranges, torch.float32 if ".mlp.gate." in name else dtype)


@lru_cache(maxsize=64)
def _dense_shards(
    hf: HFConfig, tp_rank: int, tp: int, dtype: torch.dtype, is_fp8: bool, shares_tokens: bool
) -> dict[str, WeightView]:
    """The shards of everything but routed experts, which are the same on every replica.

    shares_tokens: see ``ParallelConfig``; shared experts are then whole.
    """
    shards: dict[str, WeightView] = {}
    for name, shape, split in _dense_tensors(hf):
        if split == "kv_heads":
            ranges = _kv_heads(hf, shape, tp_rank, tp)
        else:
            is_whole = shares_tokens and ".shared_experts." in name
            ranges = _ranges(shape, None if is_whole else split, tp_rank, tp)
        shards.update(_with_scales(name, shape, ranges, dtype, is_fp8))
    return shards


def _expert_shards(
    hf: HFConfig, parallel: ParallelConfig, dtype: torch.dtype, is_fp8: bool
) -> Iterator[tuple[str, WeightView]]:
    """Whole experts with expert parallelism, otherwise the same part of the width of each expert."""
    if not _expert_layers(hf):
        return
    ep, tp = parallel.expert_parallel_size, parallel.tensor_parallel_size
    ways = 1 if parallel.enable_expert_parallel else tp
    prefix = "model.layers.0.mlp.experts.0"
    parts: list[tuple[str, WeightView]] = []
    for name, shape, split in mlp_tensors(prefix, hf.hidden_size, hf.moe_intermediate_size):
        parts += _with_scales(name, shape, _ranges(shape, split, parallel.rank % ways, ways), dtype, is_fp8)
    first, stop = _part(hf.n_routed_experts, parallel.rank % ep, ep)
    names = _expert_names(hf, tuple(name.removeprefix(prefix) for name, _ in parts))
    shards = [shard for _, shard in parts] * (stop - first)
    for names_of_layer in names:
        yield from zip(names_of_layer[first * len(parts) : stop * len(parts)], shards, strict=True)


@lru_cache(maxsize=4)
def _expert_names(hf: HFConfig, suffixes: tuple[str, ...]) -> list[list[str]]:
    """The names of each MoE layer's expert tensors, expert by expert; made once for all ranks."""
    return [
        [
            f"model.layers.{layer}.mlp.experts.{expert}{suffix}"
            for expert in range(hf.n_routed_experts)
            for suffix in suffixes
        ]
        for layer in _expert_layers(hf)
    ]


def _expert_layers(hf: HFConfig) -> list[int]:
    num_layers = hf.num_hidden_layers
    return [
        *filter(hf.is_moe_layer, range(num_layers)),
        *range(num_layers, num_layers + hf.mtp_num_layers * hf.has_moe_mtp),
    ]


def _dense_tensors(hf: HFConfig) -> Iterator[LayerTensor]:
    yield LayerTensor("model.embed_tokens.weight", (hf.vocab_size, hf.hidden_size), 0)
    for layer in range(hf.num_hidden_layers):
        for tensor in layer_tensors(hf, hf.is_moe_layer(layer)):
            yield tensor._replace(name=f"model.layers.{layer}.{tensor.name}")
    for layer in range(hf.num_hidden_layers, hf.num_hidden_layers + hf.mtp_num_layers):
        for tensor in (*mtp_own_tensors(hf), *layer_tensors(hf, hf.has_moe_mtp)):
            yield tensor._replace(name=f"model.layers.{layer}.{tensor.name}")
    yield LayerTensor("model.norm.weight", (hf.hidden_size,))
    if not hf.tie_word_embeddings:
        yield LayerTensor("lm_head.weight", (hf.vocab_size, hf.hidden_size), 0)


def _kv_heads(hf: HFConfig, shape: Shape, tp_rank: int, tp: int) -> Ranges:
    """With more ranks than key-value heads, neighbouring ranks own the same head."""
    num_copies = max(1, tp // hf.num_key_value_heads)
    return _ranges(shape, 0, tp_rank // num_copies, tp // num_copies)


def _ranges(shape: Shape, dim: Split, index: int, ways: int) -> Ranges:
    return tuple(_part(size, index, ways) if axis == dim else (0, size) for axis, size in enumerate(shape))


def _part(size: int, index: int, ways: int) -> tuple[int, int]:
    part = size // ways
    return index * part, (index + 1) * part

"""Names and shapes of every tensor of a Hugging Face checkpoint, from its config alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import TypeVar

from hf_formats.config import HFModelConfig
from hf_formats.layer_tensors import layer_tensors, mtp_own_tensors

TensorSpec = tuple[tuple[int, ...], str]  # shape, dtype name
Item = TypeVar("Item")
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@lru_cache(maxsize=8)
def hf_tensors(hf: HFModelConfig) -> Mapping[str, TensorSpec]:
    """Name -> (shape, dtype) of every tensor of the plain checkpoint (no FP8 scales), in file order.

    A tied head has no tensor of its own. The first ``hf.mtp_num_layers`` multi-token-prediction modules are included.
    """
    hidden, dtype = hf.hidden_size, hf.torch_dtype
    tensors: dict[str, TensorSpec] = {"model.embed_tokens.weight": ((hf.vocab_size, hidden), dtype)}
    for layer in range(hf.num_hidden_layers):
        tensors.update(layer_specs(hf, layer, hf.is_moe_layer(layer)))
    for depth in range(hf.mtp_num_layers):
        tensors.update(mtp_tensors(hf, hf.num_hidden_layers + depth))
    tensors["model.norm.weight"] = ((hidden,), dtype)
    if not hf.tie_word_embeddings:
        tensors["lm_head.weight"] = ((hf.vocab_size, hidden), dtype)
    return MappingProxyType(tensors)


def layer_specs(hf: HFModelConfig, layer: int, is_moe: bool) -> dict[str, TensorSpec]:
    """Name -> (shape, dtype) of decoder layer ``layer`` (also the MTP layer's transformer part)."""
    tensors = layer_tensors(hf, is_moe, range(hf.n_routed_experts))
    prefix = f"model.layers.{layer}."
    return {prefix + name: (shape, "float32" if always_fp32(name) else hf.torch_dtype) for name, shape, _ in tensors}


def mtp_tensors(hf: HFModelConfig, layer: int) -> dict[str, TensorSpec]:
    """Name -> (shape, dtype) of the multi-token-prediction module that DeepSeek publishes as layer ``layer``."""
    copy, prefix = (hf.vocab_size, hf.hidden_size), f"model.layers.{layer}."
    shapes = {"embed_tokens.weight": copy} | {name: shape for name, shape, _ in mtp_own_tensors(hf)}
    shapes["shared_head.head.weight"] = copy
    own: dict[str, TensorSpec] = {prefix + name: (shape, hf.torch_dtype) for name, shape in shapes.items()}
    return own | layer_specs(hf, layer, hf.has_moe_mtp)


def shared_copies(hf: HFModelConfig) -> dict[str, str]:
    """Published name -> name of the main model's tensor that it repeats: an MTP module has no embedding of its own."""
    copies = {}
    for layer in range(hf.num_hidden_layers, hf.num_hidden_layers + hf.mtp_num_layers):
        copies[f"model.layers.{layer}.embed_tokens.weight"] = "model.embed_tokens.weight"
        copies[f"model.layers.{layer}.shared_head.head.weight"] = "lm_head.weight"
    return copies


def always_fp32(hf_name: str) -> bool:
    """Whether DeepSeek keeps this tensor in fp32 whatever the weights' dtype: the router's correction bias."""
    return hf_name.endswith("e_score_correction_bias")


def hf_bytes(hf: HFModelConfig) -> int:
    return sum(math.prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in hf_tensors(hf).values())


def packed(items: Iterable[Item], num_bytes: Callable[[Item], int], max_bytes: int) -> Iterator[list[Item]]:
    """Consecutive items in groups of at most ``max_bytes``; a larger item is a group of its own."""
    group: list[Item] = []
    filled = 0
    for item in items:
        size = num_bytes(item)
        if group and filled + size > max_bytes:
            yield group
            group, filled = [], 0
        group.append(item)
        filled += size
    if group:
        yield group

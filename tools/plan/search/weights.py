"""Parameters of one rank by arithmetic from config.json's figures: the same numbers as the models that a run builds.

Multi-token-prediction modules are not counted.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from math import prod

from hf_formats.config import HFModelConfig
from hf_formats.layer_tensors import LayerTensor, layer_tensors
from megatron.core.parallel_layout import ParallelLayout


@lru_cache(maxsize=4096)
def training_stage(hf: HFModelConfig, layout: ParallelLayout, stage: int) -> tuple[int, int]:
    """(not experts, experts) on a rank of pipeline stage ``stage``."""
    parts = _layers(hf, tuple(map(hf.is_moe_layer, layout.stage_layers(stage, hf.num_hidden_layers))))
    # Rows of queries, keys and values are one matrix, cut into equal parts whatever the number of heads.
    cut, whole = parts["cut"] + parts["kv_heads"] + parts["shared"], parts["whole"] + parts["router"]
    if layout.mla_down_proj_column_parallel:
        cut += parts["latent_down"]
    else:
        whole += parts["latent_down"]
    vocabulary = hf.vocab_size * hf.hidden_size
    if stage == 0:
        cut += vocabulary
    if stage == layout.pipeline_model_parallel_size - 1:
        cut += 0 if hf.tie_word_embeddings and stage == 0 else vocabulary
        whole += hf.hidden_size
    expert_ranks = layout.expert_model_parallel_size * layout.expert_tensor_parallel_size
    return cut // layout.tensor_model_parallel_size + whole, parts["experts"] // expert_ranks


@lru_cache(maxsize=512)
def rollout_rank(hf: HFModelConfig, tp: int, expert_ranks: int, shares_tokens: bool = False) -> tuple[int, int]:
    """(all but the gates of MoE layers, those gates) on a rollout rank; experts split or cut over ``expert_ranks``.

    shares_tokens: ``use_sequence_parallel_moe``, every rank then has the shared experts whole.
    """
    parts = _layers(hf, tuple(map(hf.is_moe_layer, range(hf.num_hidden_layers))))
    cut = parts["cut"] + hf.vocab_size * hf.hidden_size * (1 if hf.tie_word_embeddings else 2)
    whole = parts["whole"] + parts["latent_down"] + hf.hidden_size
    if shares_tokens:
        whole += parts["shared"]
    else:
        cut += parts["shared"]
    # With more ranks than heads of keys and values, each of them has a whole one.
    kv_heads = parts["kv_heads"] // min(tp, hf.num_key_value_heads)
    return cut // tp + kv_heads + whole + parts["experts"] // expert_ranks, parts["router"]


def absorbed_copies(hf: HFModelConfig, tp: int) -> int:
    """Values of the contiguous W_UK and W_UV that a rollout engine keeps beside the weights: on Ascend, and where FP8
    weights are multiplied in FP8.
    """
    if not hf.is_mla:
        return 0
    heads = hf.num_attention_heads // tp
    return hf.num_hidden_layers * heads * (hf.qk_nope_head_dim + hf.v_head_dim) * hf.kv_lora_rank


@lru_cache(maxsize=1024)
def _layers(hf: HFModelConfig, kinds: tuple[bool, ...]) -> Counter[str]:
    """Parameters of layers with (True) or without experts, by how tensor parallelism treats them."""
    parts = Counter[str]()
    for is_moe, num_layers in Counter(kinds).items():
        for tensor in layer_tensors(hf, is_moe, experts=(0,)):
            part = _part(tensor)
            copies = hf.n_routed_experts if part == "experts" else 1
            parts[part] += num_layers * copies * prod(tensor.shape)
    return parts


def _part(tensor: LayerTensor) -> str:
    name, shape, split = tensor
    if name.endswith("e_score_correction_bias"):
        return "no parameter"
    named = {"mlp.experts.": "experts", "mlp.shared_experts.": "shared", "mlp.gate.": "router"}
    for prefix, part in named.items():
        if name.startswith(prefix):
            return part
    if split is None:
        return "whole" if len(shape) == 1 else "latent_down"
    return "kv_heads" if split == "kv_heads" else "cut"

"""A tiny DeepSeek-V3, packed batches and a one-process world for the model tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.ops import TrainOps, reference_ops
from megatron.core.packed_seq_params import PackedSeqParams, SharedPrompts
from megatron.core.parallel_state import ProcessGroups
from megatron.core.transformer.transformer_config import MLATransformerConfig


def tiny_config(**changes: Any) -> MLATransformerConfig:
    """Hidden 64, 3 layers (the first dense), 8 experts in 4 groups, top 2 of 2 groups, YaRN factor 4."""
    values: dict[str, Any] = {
        "num_layers": 3,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "ffn_hidden_size": 96,
        "vocab_size": 128,
        "layernorm_epsilon": 1e-6,
        "num_moe_experts": 8,
        "moe_ffn_hidden_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "moe_layer_freq": [0, 1, 1],
        "moe_router_topk": 2,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "init_method_std": 0.1,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 16,
        "rotary_scaling_factor": 4.0,
        "original_max_position_embeddings": 64,
        "max_position_embeddings": 256,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    return MLATransformerConfig(**(values | changes))


@dataclass(frozen=True)
class PackedBatch:
    """ids, positions and labels int64 [T]; the last sequence may be padding."""

    ids_T: torch.Tensor
    positions_T: torch.Tensor
    labels_T: torch.Tensor
    params: PackedSeqParams


def packed_batch(lengths: list[int], vocab_size: int, seed: int = 0) -> PackedBatch:
    """Random sequences of the given lengths, packed."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    boundaries = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return PackedBatch(
        ids_T=torch.randint(0, vocab_size, (total,), generator=generator),
        positions_T=torch.cat([torch.arange(length) for length in lengths]),
        labels_T=torch.randint(0, vocab_size, (total,), generator=generator),
        params=PackedSeqParams(boundaries, max(lengths)),
    )


def shared_prompts(prompts: list[int], own: list[int]) -> tuple[torch.Tensor, int, SharedPrompts]:
    """Samples of prompts of these lengths, neighbours with one length sharing theirs, and of own tokens: bounds and the
    longest length of whole sequences, and where their tokens are.
    """
    spans: list[list[int]] = []
    computed: list[int] = []
    num_computed = start = 0
    for row, (prompt, length) in enumerate(zip(prompts, own, strict=True)):
        if row == 0 or prompt != prompts[row - 1]:
            start, num_computed = num_computed, num_computed + prompt
        spans.append([start, start + prompt, num_computed, num_computed + length])
        computed += [*range(*spans[-1][:2]), *range(*spans[-1][2:])]
        num_computed += length
    whole = torch.tensor([computed.index(token) for token in range(num_computed)])
    lengths = torch.tensor(prompts) + torch.tensor(own)
    bounds = torch.cat((torch.zeros(1), lengths.cumsum(0))).int()
    shared = SharedPrompts(torch.tensor(spans), torch.tensor(computed), whole, torch.ones(num_computed))
    return bounds, int(lengths.max()), shared


@contextmanager
def one_process_world() -> Iterator[None]:
    """A gloo world of this process alone, without model parallel groups."""
    with tempfile.TemporaryDirectory() as tmp:
        dist.init_process_group("gloo", init_method=f"file://{tmp}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


@contextmanager
def one_process_groups() -> Iterator[ProcessGroups]:
    """The groups of a gloo world of this process alone."""
    with one_process_world():
        try:
            yield parallel_state.initialize_model_parallel()
        finally:
            parallel_state.destroy_model_parallel()


def make_model(
    config: MLATransformerConfig, groups: ProcessGroups, seed: int = 7, ops: TrainOps | None = None
) -> GPTModel:
    """A model with random weights and a random non-zero expert bias, the same in every layout."""
    model = GPTModel(config, groups, ops or reference_ops())
    model.init_weights(seed)
    for layer in model.decoder.layers:
        if config.is_moe_layer(layer.global_layer):
            generator = torch.Generator().manual_seed(layer.global_layer)
            layer.mlp.router.expert_bias.copy_(torch.randn(config.num_moe_experts, generator=generator) * 0.1)
    return model

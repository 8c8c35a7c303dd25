"""Parameters of one rank by arithmetic from config.json's figures: the same numbers as the models that a run builds.

Multi-token-prediction modules are not counted.
"""

from __future__ import annotations

from functools import lru_cache

from hf_formats.config import HFModelConfig
from megatron.core.parallel_layout import ParallelLayout
from tools.plan.timing.work import model_work


@lru_cache(maxsize=4096)
def training_stage(hf: HFModelConfig, layout: ParallelLayout, stage: int) -> tuple[int, int]:
    """(not experts, experts) on a rank of pipeline stage ``stage``."""
    layers = layout.stage_layers(stage, hf.num_hidden_layers)
    cut, whole, experts = _layers(hf, tuple(map(hf.is_moe_layer, layers)), layout.mla_down_proj_column_parallel)
    vocabulary = hf.vocab_size * hf.hidden_size
    if stage == 0:
        cut += vocabulary
    if stage == layout.pipeline_model_parallel_size - 1:
        cut += 0 if hf.tie_word_embeddings and stage == 0 else vocabulary
        whole += hf.hidden_size
    expert_ranks = layout.expert_model_parallel_size * layout.expert_tensor_parallel_size
    return cut // layout.tensor_model_parallel_size + whole, experts // expert_ranks


@lru_cache(maxsize=512)
def rollout_rank(hf: HFModelConfig, tp: int, expert_ranks: int, shares_tokens: bool = False) -> tuple[int, int]:
    """(all but the gates of MoE layers, those gates) on a rollout rank; experts split or cut over ``expert_ranks``.

    shares_tokens: ``use_sequence_parallel_moe``, every rank then has the shared experts whole.
    """
    cut, whole, experts = _layers(hf, tuple(map(hf.is_moe_layer, range(hf.num_hidden_layers))), False)
    shared = int(hf.num_moe_layers * model_work(hf).layer.shared) if shares_tokens else 0
    cut, whole = cut - shared, whole + shared
    cut += hf.vocab_size * hf.hidden_size * (1 if hf.tie_word_embeddings else 2)
    routers = hf.num_moe_layers * hf.hidden_size * hf.n_routed_experts
    return cut // tp + whole + hf.hidden_size + experts // expert_ranks - routers, routers


def absorbed_copies(hf: HFModelConfig, tp: int) -> int:
    """Values of the contiguous W_UK and W_UV that Ascend's rollout engine keeps beside the weights."""
    if not hf.is_mla:
        return 0
    heads = hf.num_attention_heads // tp
    return hf.num_hidden_layers * heads * (hf.qk_nope_head_dim + hf.v_head_dim) * hf.kv_lora_rank


@lru_cache(maxsize=1024)
def _layers(hf: HFModelConfig, kinds: tuple[bool, ...], cuts_latent_down: bool) -> tuple[int, int, int]:
    """Parameters of layers with (True) or without experts: split over tensor-parallel ranks, on every one of them, and
    of routed experts.

    cuts_latent_down: ``mla_down_proj_column_parallel``.
    """
    layer, num_moe = model_work(hf).layer, sum(kinds)
    down = 0 if cuts_latent_down else layer.latent_down
    cut = len(kinds) * (layer.attention - down) + num_moe * layer.shared + (len(kinds) - num_moe) * layer.dense_mlp
    whole = len(kinds) * (2 * hf.hidden_size + layer.latent_norms + down) + num_moe * layer.router
    return int(cut), int(whole), int(num_moe * hf.n_routed_experts * layer.expert)

"""How much there is to do: floating-point operations, weights and cache of one layer, from the model's figures alone.

Operations count 2 for a multiplication with its addition. Weights are numbers of parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import log, prod, sqrt

from hf_formats.config import HFModelConfig
from hf_formats.layer_tensors import layer_tensors


@dataclass(frozen=True)
class LayerWork:
    """Parameters of the matrices of one layer's parts, and operations of attention itself."""

    attention: float  # projections
    dense_mlp: float  # of a layer without experts
    expert: float  # one routed expert
    shared: float  # the shared experts
    router: float  # the gate
    score: float  # operations for one query and one key, scores and values together, in training and prefill
    absorbed_score: float  # the same in decoding, where latent attention works on the compressed cache
    cache: float  # numbers that one token leaves in the cache
    cache_shards: int  # tensor-parallel ranks that it can be split over; 1: each has it whole


@dataclass(frozen=True)
class ModelWork:
    """A model's layers and ends. embedding, head: parameters of the two ends."""

    layer: LayerWork
    num_layers: int
    num_dense: int
    num_experts: int
    topk: int
    hidden: int
    embedding: float
    head: float

    @property
    def num_moe(self) -> int:
        return self.num_layers - self.num_dense

    @cached_property
    def expert_parameters(self) -> float:
        return self.num_moe * self.num_experts * self.layer.expert

    @cached_property
    def dense_parameters(self) -> float:
        layer = self.layer
        return (
            self.num_layers * layer.attention
            + self.num_dense * layer.dense_mlp
            + self.num_moe * (layer.shared + layer.router)
            + self.embedding
            + self.head
        )

    @property
    def parameters(self) -> float:
        return self.dense_parameters + self.expert_parameters


@lru_cache(maxsize=64)
def model_work(hf: HFModelConfig) -> ModelWork:
    """The work of ``hf``; multi-token-prediction modules are not counted."""

    def size(prefix: str, is_moe: bool) -> float:
        tensors = layer_tensors(hf, is_moe, experts=(0,))
        return float(sum(prod(x.shape) for x in tensors if len(x.shape) == 2 and x.name.startswith(prefix)))

    heads, hidden = hf.num_attention_heads, hf.hidden_size
    if hf.is_mla:
        shards, cache = 1, hf.kv_lora_rank + hf.qk_rope_head_dim
        score = 2.0 * heads * (hf.qk_head_dim + hf.v_head_dim)
        absorbed_score = 2.0 * heads * (cache + hf.kv_lora_rank)
    else:
        shards, cache = hf.num_key_value_heads, 2 * hf.num_key_value_heads * hf.head_dim
        score = absorbed_score = 4.0 * heads * hf.head_dim
    layer = LayerWork(
        attention=size("self_attn.", False),
        dense_mlp=size("mlp.", False),
        expert=size("mlp.experts.", True),
        shared=size("mlp.shared_experts.", True),
        router=size("mlp.gate.", True),
        score=score,
        absorbed_score=absorbed_score,
        cache=cache,
        cache_shards=shards,
    )
    return ModelWork(
        layer=layer,
        num_layers=hf.num_hidden_layers,
        num_dense=hf.num_hidden_layers - hf.num_moe_layers,
        num_experts=hf.n_routed_experts,
        topk=hf.num_experts_per_tok,
        hidden=hidden,
        embedding=hf.vocab_size * hidden,
        head=0.0 if hf.tie_word_embeddings else float(hf.vocab_size * hidden),
    )


@lru_cache(maxsize=64)
def draft_layer_work(work: ModelWork, tp: int) -> ModelWork:
    """A prediction layer that drafts: one more of the last kind, and the projection of two states to one, which each of
    ``tp`` ranks has whole. It has the embedding and the head of ``work``, which are not counted again.
    """
    projection = 2.0 * work.hidden**2 * tp
    return replace(work, num_layers=1, num_dense=0 if work.num_moe else 1, embedding=projection, head=0.0)


def train_flops_per_token(work: ModelWork, context: float) -> float:
    """Forward operations of one token that attends to ``context`` others on average, the head included."""
    layer = work.layer
    weights = (
        work.num_layers * layer.attention
        + work.num_dense * layer.dense_mlp
        + work.num_moe * (work.topk * layer.expert + layer.shared + layer.router)
        + work.embedding  # as large as the head; the lookup itself is no work
    )
    return 2.0 * weights + work.num_layers * layer.score * context


def busiest_rank(num_experts: int, num_ranks: int, load_spread: float) -> float:
    """Tokens of the busiest of ``num_ranks`` ranks over the mean.

    Experts' loads are independent, with standard deviation ``load_spread`` of their mean; a rank sums E / R of them,
    and the largest of R normal variables lies sqrt(2 ln R) deviations above the mean.
    """
    if num_ranks <= 1 or not num_experts:
        return 1.0
    return 1.0 + load_spread * sqrt(num_ranks / num_experts) * sqrt(2.0 * log(num_ranks))

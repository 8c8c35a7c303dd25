"""The decoder of every model family: embedding, layers as the config describes them, norm, head; how weights get in.

Numerics as transformers' classes of the same names.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import Tensor, nn

from hf_formats.fp8 import Fp8Weight
from hf_formats.ranges import index_of
from hf_formats.stored_extras import EMBEDDING, HEAD
from vllm.distributed.parallel_state import ParallelState
from vllm.forward_context import ForwardContext
from vllm.model_executor.layers.attention import GroupedQueryAttention
from vllm.model_executor.layers.fused_moe import DeepseekMLP, FusedMoE, write_choices
from vllm.model_executor.layers.linear import Norm, ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.layers.mla import MultiHeadLatentAttention
from vllm.model_executor.layers.rotary_embedding import RotaryTable
from vllm.model_executor.model_loader.fused_experts import split_experts
from vllm.model_executor.model_loader.weight_view import Weight, WeightView, load_weights
from vllm.ops.contract import Angles, KVCache, RolloutOps
from vllm.ops.weights import WeightCopies
from vllm.transformers_utils.config import HFConfig

logger = logging.getLogger(__name__)


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(
        self,
        hf: HFConfig,
        ops: RolloutOps,
        attention: MultiHeadLatentAttention | GroupedQueryAttention,
        mlp: DeepseekMLP | FusedMoE,
    ) -> None:
        super().__init__()
        self.ops, self.eps = ops, hf.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = Norm(hf.hidden_size), Norm(hf.hidden_size)
        self.self_attn, self.mlp = attention, mlp

    def forward(self, x_TH: Tensor, angles: Angles, cache: KVCache, context: ForwardContext) -> Tensor:
        if len(x_TH) == 0:
            # Every rank reaches an expert layer, also with no token of its own: the other replicas wait there.
            return self.mlp(x_TH, context) if isinstance(self.mlp, FusedMoE) else x_TH
        normed_TH = self.ops.rms_norm(x_TH, self.input_layernorm.weight, self.eps)
        shares_tokens = isinstance(self.mlp, FusedMoE) and self.mlp.shares_tokens
        attended_TH = self.self_attn(normed_TH, angles, cache, context, reduce=not shares_tokens)
        if context.sampled_B is not None:
            x_TH = x_TH.index_select(0, context.sampled_B)
        if shares_tokens:
            return self._in_shares(attended_TH, x_TH, context)
        normed_TH, x_TH = self.ops.add_rms_norm(attended_TH, x_TH, self.post_attention_layernorm.weight, self.eps)
        if isinstance(self.mlp, FusedMoE):
            return self.mlp(normed_TH, context).add_(x_TH)
        return self.ops.add_layer(x_TH, self.mlp, normed_TH)

    def _in_shares(self, attended_TH: Tensor, x_TH: Tensor, context: ForwardContext) -> Tensor:
        """The rest of an expert layer, by each TP rank for its own tokens; `attended_TH` is not summed over TP."""
        assert isinstance(self.mlp, FusedMoE)
        share = self.mlp.token_share(len(x_TH), context)
        weight = self.post_attention_layernorm.weight
        normed_SH, x_SH = self.ops.add_rms_norm(share.sum(attended_TH), share.own(x_TH), weight, self.eps)
        return share.gather(self.mlp.of_share(normed_SH, share, context).add_(x_SH))

    def weight_views(self, prefix: str) -> dict[str, WeightView]:
        return {
            **self.input_layernorm.weight_views(f"{prefix}.input_layernorm.weight"),
            **self.self_attn.weight_views(f"{prefix}.self_attn"),
            **self.post_attention_layernorm.weight_views(f"{prefix}.post_attention_layernorm.weight"),
            **self.mlp.weight_views(f"{prefix}.mlp"),
        }


def _make_layer(hf: HFConfig, layer: int, parallel: ParallelState, ops: RolloutOps) -> DecoderLayer:
    attention: MultiHeadLatentAttention | GroupedQueryAttention
    attention = MultiHeadLatentAttention(hf, parallel, ops) if hf.is_mla else GroupedQueryAttention(hf, parallel, ops)
    if hf.is_moe_layer(layer):
        return DecoderLayer(hf, ops, attention, FusedMoE(hf, parallel, ops))
    return DecoderLayer(hf, ops, attention, DeepseekMLP(hf.hidden_size, hf.intermediate_size, parallel.tp, ops))


class CausalLM(nn.Module):
    """This rank's part of a model. Parameters are empty until `load_weights`.

    A tied head is the embedding's weight; a checkpoint's or an update's copy of it is passed over.
    """

    def __init__(
        self, hf: HFConfig, max_model_len: int, parallel: ParallelState, ops: RolloutOps, device: torch.device
    ) -> None:
        super().__init__()
        self.hf, self.ops, self.tp_size = hf, ops, parallel.tp.world_size
        self.embed_tokens = VocabParallelEmbedding(hf.vocab_size, hf.hidden_size, ops, parallel.tp)
        self.layers = nn.ModuleList(_make_layer(hf, layer, parallel, ops) for layer in range(hf.num_hidden_layers))
        self.norm = Norm(hf.hidden_size)
        self.lm_head = ParallelLMHead(hf.vocab_size, hf.hidden_size, ops, parallel.tp)
        if hf.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.rotary = RotaryTable(hf.rope, hf.rope_dim, max_model_len, device)
        self.weight_views = self._all_weight_views()

    @property
    def prunes_last_layer(self) -> bool:
        """Whether the last layer heeds `ForwardContext.sampled_B`, and a kept token's results are the same bits."""
        return self.ops.prefill_equals_decode

    def new_kv_cache(
        self, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, layout: str
    ) -> KVCache:
        """One layer's paged cache."""
        hf = self.hf
        if hf.is_mla:
            sizes = (num_blocks, block_size, hf.kv_lora_rank, hf.qk_rope_head_dim)
            return self.ops.new_kv_cache(*sizes, dtype, device, layout)
        assert layout == "nd", layout  # the config refuses others
        num_heads = hf.kv_heads_of_rank(self.tp_size)
        return self.ops.new_gqa_cache(num_blocks, block_size, num_heads, hf.head_dim, dtype, device)

    def forward(self, ids_T: Tensor, kv_caches: list[KVCache], context: ForwardContext) -> Tensor:
        """Hidden states [T, H] before the final norm, of the tokens that the last layer keeps. ids_T int64 [T].

        kv_caches holds one cache per layer and, where choices of experts are kept, one more for those.
        """
        num_layers = len(self.layers)
        keeps_choices = len(kv_caches) > num_layers
        context.routed_experts = [] if keeps_choices else None
        x_TH = self.embed_tokens(ids_T)
        angles = self.rotary.at(context.positions_T)
        for layer, cache in zip(self.layers[:-1], kv_caches[: num_layers - 1], strict=True):
            x_TH = layer(x_TH, angles, cache, context)
        last = context.last_layer if context.last_layer is not None else context
        x_TH = self.layers[-1](x_TH, angles, kv_caches[num_layers - 1], last)
        if context.routed_experts:
            write_choices(kv_caches[num_layers], context.routed_experts, context.slots_T)
        return x_TH

    def compute_logits(self, x_BH: Tensor) -> Tensor:
        """fp32 [B, V] next-token logits of hidden states [B, H]."""
        return self.lm_head(self.ops.rms_norm(x_BH, self.norm.weight, self.hf.rms_norm_eps))

    def load_weights(self, weights: Iterable[tuple[str, Weight]]) -> set[str]:
        """Take (hf_name, full tensor) pairs, any part of the model in any order; returns the names taken.

        The experts of a layer may come in one tensor, see `split_experts`. A tied head that comes too is refused where
        it is no copy of the embedding.
        """
        heads: list[Tensor] = []

        def without_tied_head() -> Iterator[tuple[str, Weight]]:
            for name, weight in split_experts(weights):
                if name == HEAD and self.hf.tie_word_embeddings:
                    heads.append(self._embedding_part(weight))
                else:
                    yield name, weight

        loaded = load_weights(self.weight_views, self.hf.num_hidden_layers, without_tied_head())
        self.renew_weight_copies(loaded)
        for head in heads:
            self._check_tied_head(head)
        return loaded

    def _embedding_part(self, head: Weight) -> Tensor:
        """A copy of what this rank holds of a tied head; its embedding may come later, and streams reuse memory."""
        view = self.weight_views[EMBEDDING]
        shape = None if isinstance(head, Fp8Weight) else tuple(head.shape)
        if isinstance(head, Fp8Weight) or shape != view.hf_shape:
            raise ValueError(
                f"weight {HEAD} has shape {shape}, {EMBEDDING}, to which config.json ties it, {view.hf_shape}"
            )
        return head[index_of(view.ranges)].clone()

    def _check_tied_head(self, head: Tensor) -> None:
        held = self.weight_views[EMBEDDING].read()
        if not torch.equal(head.to(held.device, held.dtype), held):
            raise ValueError(
                f"weight {HEAD} differs from {EMBEDDING}, to which config.json ties it: leave it out of the update, or "
                "set tie_word_embeddings to false where the engine is built"
            )
        logger.info("weight %s is ignored: it is a copy of %s, to which it is tied", HEAD, EMBEDDING)

    def renew_weight_copies(self, names: Iterable[str]) -> None:
        """Let the copies of weights follow those of `names`, whose values are new."""
        changed = {id(self.weight_views[name].parameter) for name in names}
        for module in self.modules():
            if isinstance(module, WeightCopies) and id(module.weight) in changed:
                module.renew()

    def _all_weight_views(self) -> dict[str, WeightView]:
        views = self.embed_tokens.weight_views(EMBEDDING)
        for index, layer in enumerate(self.layers):
            views |= cast(DecoderLayer, layer).weight_views(f"model.layers.{index}")
        views |= self.norm.weight_views("model.norm.weight")
        return views if self.hf.tie_word_embeddings else views | self.lm_head.weight_views(HEAD)

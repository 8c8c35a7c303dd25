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
from vllm.model_executor.layers.fused_moe import write_choices
from vllm.model_executor.layers.linear import Norm, ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.layers.rotary_embedding import RotaryTable
from vllm.model_executor.model_loader.fused_experts import split_experts
from vllm.model_executor.model_loader.weight_view import Weight, WeightView, load_weights
from vllm.model_executor.models.decoder_layer import DecoderLayer, make_layer
from vllm.model_executor.models.deepseek_mtp import MultiTokenPredictor
from vllm.ops.contract import KVCache, RolloutOps
from vllm.ops.weights import WeightCopies
from vllm.transformers_utils.config import HFConfig

logger = logging.getLogger(__name__)


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
        self.layers = nn.ModuleList(make_layer(hf, layer, parallel, ops) for layer in range(hf.num_hidden_layers))
        self.norm = Norm(hf.hidden_size)
        self.mtp = MultiTokenPredictor(hf, parallel, ops) if hf.mtp_num_layers else None
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

    @property
    def num_caches(self) -> int:
        """Caches of keys and values: one of each layer, that of the prediction layer last."""
        return len(self.layers) + (self.mtp is not None)

    def forward(self, ids_T: Tensor, kv_caches: list[KVCache], context: ForwardContext) -> Tensor:
        """Hidden states [T, H] before the final norm, or behind it for a prediction layer, of the tokens that the last
        layer keeps. ids_T int64 [T].

        kv_caches holds `num_caches` and, where choices of experts are kept, one more for those.
        """
        num_layers = len(self.layers)
        keeps_choices = len(kv_caches) > self.num_caches
        context.routed_experts = [] if keeps_choices else None
        x_TH = self.embed_tokens(ids_T)
        angles = self.rotary.at(context.positions_T)
        for layer, cache in zip(self.layers[:-1], kv_caches[: num_layers - 1], strict=True):
            x_TH = layer(x_TH, angles, cache, context)
        last = context.last_layer if context.last_layer is not None else context
        x_TH = self.layers[-1](x_TH, angles, kv_caches[num_layers - 1], last)
        if context.routed_experts:
            write_choices(kv_caches[-1], context.routed_experts, context.slots_T)
        return x_TH if self.mtp is None else self._normed(x_TH)

    def compute_logits(self, x_BH: Tensor) -> Tensor:
        """fp32 [B, V] logits of the next token, of the states that this module returns, or of the token after it, of
        those that `predict` returns.
        """
        return self.lm_head(self._normed(x_BH) if self.mtp is None else x_BH)

    def predict(self, ids_T: Tensor, states_TH: Tensor, kv_caches: list[KVCache], context: ForwardContext) -> Tensor:
        """The prediction layer's states [T, H], for `compute_logits`, and for `predict` at the next position.

        ids_T int64 [T]: the tokens that follow those of the context, whose states are ``states_TH``.
        """
        assert self.mtp is not None
        angles = self.rotary.at(context.positions_T)
        return self.mtp(self.embed_tokens(ids_T), states_TH, angles, kv_caches[len(self.layers)], context)

    def _normed(self, x_TH: Tensor) -> Tensor:
        return self.ops.rms_norm(x_TH, self.norm.weight, self.hf.rms_norm_eps)

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
        if self.mtp is not None:
            views |= self.mtp.weight_views(f"model.layers.{len(self.layers)}")
        views |= self.norm.weight_views("model.norm.weight")
        return views if self.hf.tie_word_embeddings else views | self.lm_head.weight_views(HEAD)

"""A decoder layer as a model's config describes it.

Letters: T tokens of a step, S tokens of a TP rank's share, H hidden size.
"""

from __future__ import annotations

from torch import Tensor, nn

from vllm.distributed.parallel_state import ParallelState
from vllm.forward_context import ForwardContext
from vllm.model_executor.layers.attention import GroupedQueryAttention
from vllm.model_executor.layers.fused_moe import DeepseekMLP, FusedMoE
from vllm.model_executor.layers.linear import Norm
from vllm.model_executor.layers.mla import MultiHeadLatentAttention
from vllm.model_executor.model_loader.weight_view import WeightView
from vllm.ops.contract import Angles, KVCache, RolloutOps
from vllm.transformers_utils.config import HFConfig


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


def make_layer(hf: HFConfig, layer: int, parallel: ParallelState, ops: RolloutOps) -> DecoderLayer:
    attention: MultiHeadLatentAttention | GroupedQueryAttention
    attention = MultiHeadLatentAttention(hf, parallel, ops) if hf.is_mla else GroupedQueryAttention(hf, parallel, ops)
    if hf.is_moe_layer(layer):
        return DecoderLayer(hf, ops, attention, FusedMoE(hf, parallel, ops))
    return DecoderLayer(hf, ops, attention, DeepseekMLP(hf.hidden_size, hf.intermediate_size, parallel.tp, ops))

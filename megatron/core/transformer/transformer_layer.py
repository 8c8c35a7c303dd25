"""One decoder layer: attention and feed-forward, each behind a norm and around a residual."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.core.ops import TrainOps
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import ProcessGroups
from megatron.core.tensor_parallel.checkpoint import CheckpointWithoutOutput, checkpoint
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import without_counting
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.norm import RMSNorm
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig


class TransformerLayer(nn.Module):
    """[T/TP, H] -> [T/TP, H]. ``global_layer`` is the 0-based number in the whole model; it says dense or MoE.

    The layer handles the ``recompute_modules`` layernorm (the outputs are not kept), mlp and moe (only their input is
    kept); the attention and the experts handle the others.
    """

    def __init__(self, config: TransformerConfig, groups: ProcessGroups, ops: TrainOps, global_layer: int) -> None:
        super().__init__()
        self.global_layer = global_layer
        self.input_layernorm = RMSNorm(config, ops, config.hidden_size)
        self.self_attention: MLASelfAttention | SelfAttention
        if isinstance(config, MLATransformerConfig):
            self.self_attention = MLASelfAttention(config, groups, ops)
        else:
            self.self_attention = SelfAttention(config, groups, ops)
        self.pre_mlp_layernorm = RMSNorm(config, ops, config.hidden_size)
        self.mlp: MLP | MoELayer
        if config.is_moe_layer(global_layer):
            self.mlp = MoELayer(config, groups, ops, global_layer)
        else:
            self.mlp = MLP(config, groups, ops, config.ffn_hidden_size)
        self.recomputes_norms = config.recomputes("layernorm")
        self.recomputes_mlp = config.recomputes("moe" if config.is_moe_layer(global_layer) else "mlp")

    def forward(
        self, x_TH: Tensor, rotary_cos_sin: tuple[Tensor, Tensor], packed_seq_params: PackedSeqParams
    ) -> Tensor:
        norm = CheckpointWithoutOutput(self.recomputes_norms)
        normed_TH = norm.checkpoint(self.input_layernorm, x_TH)
        attended_TH = self.self_attention(normed_TH, rotary_cos_sin, packed_seq_params)
        norm.discard_output_and_register_recompute(attended_TH)
        x_TH = x_TH + attended_TH

        norm = CheckpointWithoutOutput(self.recomputes_norms)
        y_TH = self._feed_forward(norm.checkpoint(self.pre_mlp_layernorm, x_TH), packed_seq_params)
        norm.discard_output_and_register_recompute(y_TH)
        return x_TH + y_TH

    def _feed_forward(self, x_TH: Tensor, packed_seq_params: PackedSeqParams) -> Tensor:
        arguments = (x_TH, packed_seq_params) if isinstance(self.mlp, MoELayer) else (x_TH,)
        if self.recomputes_mlp and torch.is_grad_enabled():
            return checkpoint(self.mlp, *arguments, recompute_context=lambda: without_counting(self.mlp))
        y_TH: Tensor = self.mlp(*arguments)
        return y_TH

"""DeepSeek-V3's prediction layer (arXiv 2412.19437, section 2.2), which drafts the token after the next.

Letters: T tokens, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm.distributed.parallel_state import ParallelState
from vllm.forward_context import ForwardContext
from vllm.model_executor.layers.linear import ColumnParallelLinear, Norm
from vllm.model_executor.model_loader.weight_view import WeightView
from vllm.model_executor.models.decoder_layer import make_layer
from vllm.ops.contract import Angles, KVCache, RolloutOps
from vllm.transformers_utils.config import HFConfig


class MultiTokenPredictor(nn.Module):
    """``norm(layer(M [norm(embedding of the next token); norm(state)]))``, as the training engine has it: states are
    those behind the model's final norm, embedding and head are the model's.
    """

    def __init__(self, hf: HFConfig, parallel: ParallelState, ops: RolloutOps) -> None:
        super().__init__()
        hidden = hf.hidden_size
        self.ops, self.eps = ops, hf.rms_norm_eps
        self.enorm, self.hnorm, self.norm = Norm(hidden), Norm(hidden), Norm(hidden)
        self.eh_proj = ColumnParallelLinear(2 * hidden, [hidden], ops)
        self.layer = make_layer(hf, hf.num_hidden_layers - 1, parallel, ops)

    def forward(
        self, embedded_TH: Tensor, normed_TH: Tensor, angles: Angles, cache: KVCache, context: ForwardContext
    ) -> Tensor:
        """[T, H] -> [T, H]. In lock-step every rank calls it, with T = 0 when it has nothing to do."""
        if len(normed_TH) == 0:
            return self.layer(normed_TH, angles, cache, context)
        parts = [
            self.ops.rms_norm(x_TH, norm.weight, self.eps)
            for x_TH, norm in ((embedded_TH, self.enorm), (normed_TH, self.hnorm))
        ]
        x_TH = self.layer(self.eh_proj(torch.cat(parts, dim=-1)), angles, cache, context)
        return self.ops.rms_norm(x_TH, self.norm.weight, self.eps)

    def weight_views(self, prefix: str) -> dict[str, WeightView]:
        return {
            **self.enorm.weight_views(f"{prefix}.enorm.weight"),
            **self.hnorm.weight_views(f"{prefix}.hnorm.weight"),
            **self.eh_proj.weight_views(f"{prefix}.eh_proj.weight"),
            **self.layer.weight_views(prefix),
            **self.norm.weight_views(f"{prefix}.shared_head.norm.weight"),
        }

"""The routed experts of one rank, computed together by grouped matmuls."""

from __future__ import annotations

import torch
from torch import nn

from megatron.core.ops import TrainOps
from megatron.core.parallel_state import ProcessGroups
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.weight_init import WeightInit
from megatron.core.transformer.transformer_config import TransformerConfig


class GroupedMLP(nn.Module):
    """SwiGLU experts with stacked weights: weight1 [L, H, 2F] (gate, then up) and weight2 [L, F, H], L experts here.

    EP rank e holds the experts ``e*L .. (e+1)*L - 1``.
    """

    def __init__(self, config: TransformerConfig, groups: ProcessGroups, ops: TrainOps) -> None:
        super().__init__()
        assert config.num_moe_experts is not None and config.moe_ffn_hidden_size is not None
        if config.num_moe_experts % groups.ep.size():
            raise ValueError(
                f"{config.num_moe_experts} experts do not divide over expert_model_parallel_size {groups.ep.size()}"
            )
        self.num_local_experts = config.num_moe_experts // groups.ep.size()
        self.first_expert = groups.ep.rank() * self.num_local_experts
        self.ops = ops
        hidden, ffn, dtype = config.hidden_size, config.moe_ffn_hidden_size, config.params_dtype
        self.weight1 = nn.Parameter(torch.empty(self.num_local_experts, hidden, 2 * ffn, dtype=dtype))
        self.weight2 = nn.Parameter(torch.empty(self.num_local_experts, ffn, hidden, dtype=dtype))
        for weight in (self.weight1, self.weight2):
            set_tensor_model_parallel_attributes(weight, is_parallel=False, allreduce=False)

    def forward(self, rows: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """rows [n, H] sorted by local expert, int64 [L] rows of each -> [n, H]."""
        hidden = self.ops.swiglu(self.ops.grouped_matmul(rows, self.weight1, tokens_per_expert))
        return self.ops.grouped_matmul(hidden, self.weight2, tokens_per_expert)

    def init_weights(self, init: WeightInit, name: str) -> None:
        """Fill every local expert from the tensors gate, up and down of its global number under ``name``."""
        ffn, hidden = self.weight2.shape[1:]
        with torch.no_grad():
            for local in range(self.num_local_experts):
                expert = f"{name}.{self.first_expert + local}"
                self.weight1[local, :, :ffn].copy_(init.normal(f"{expert}.gate", ffn, hidden).t())
                self.weight1[local, :, ffn:].copy_(init.normal(f"{expert}.up", ffn, hidden).t())
                self.weight2[local].copy_(init.normal(f"{expert}.down", hidden, ffn).t())

"""The routed experts of one rank, computed together by grouped matmuls."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.core.ops import TrainOps
from megatron.core.parallel_state import ProcessGroups
from megatron.core.tensor_parallel.checkpoint import CheckpointWithoutOutput
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.weight_init import WeightInit, rank_slice
from megatron.core.transformer.transformer_config import TransformerConfig


class GroupedMLP(nn.Module):
    """SwiGLU experts with stacked weights: weight1 [L, H, 2F] (gate, then up) and weight2 [L, F, H], L experts here.

    EP rank e holds the experts ``e*L .. (e+1)*L - 1``. Expert-TP rank t of n holds the t-th n-th of F of each of them:
    columns of gate and of up, rows of weight2. Its results are then terms of a sum over ``groups.etp``.
    """

    def __init__(self, config: TransformerConfig, groups: ProcessGroups, ops: TrainOps) -> None:
        super().__init__()
        assert config.num_moe_experts is not None and config.moe_ffn_hidden_size is not None
        self.num_local_experts = config.num_moe_experts // groups.ep.size()
        self.first_expert = groups.ep.rank() * self.num_local_experts
        self.etp = groups.etp
        self.ops = ops
        self.recomputes_activation = config.recomputes("moe_act")
        hidden, dtype = config.hidden_size, config.params_dtype
        ffn = config.moe_ffn_hidden_size // groups.etp.size()
        self.weight1 = nn.Parameter(torch.empty(self.num_local_experts, hidden, 2 * ffn, dtype=dtype))
        self.weight2 = nn.Parameter(torch.empty(self.num_local_experts, ffn, hidden, dtype=dtype))
        is_split = groups.etp.size() > 1
        for weight, dim, stride in ((self.weight1, 2, 2), (self.weight2, 1, 1)):
            set_tensor_model_parallel_attributes(
                weight,
                is_parallel=is_split,
                dim=dim if is_split else -1,
                stride=stride if is_split else 1,
                allreduce=False,
            )

    def forward(self, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """rows [n, H] sorted by local expert, int64 [L] rows of each -> [n, H]."""
        activation = CheckpointWithoutOutput(self.recomputes_activation)
        gate_up = self.ops.grouped_matmul(rows, self.weight1, tokens_per_expert)
        hidden = activation.checkpoint(self.ops.swiglu, gate_up)
        results = self.ops.grouped_matmul(hidden, self.weight2, tokens_per_expert)
        activation.discard_output_and_register_recompute(results)
        return results

    def init_weights(self, init: WeightInit, name: str) -> None:
        """Fill every local expert from the tensors gate, up and down of its global number under ``name``."""
        ffn, hidden = self.weight2.shape[1:]
        part, parts = self.etp.rank(), self.etp.size()
        with torch.no_grad():
            for local in range(self.num_local_experts):
                expert = f"{name}.{self.first_expert + local}"
                gate = init.normal(f"{expert}.gate", ffn * parts, hidden)
                up = init.normal(f"{expert}.up", ffn * parts, hidden)
                down = init.normal(f"{expert}.down", hidden, ffn * parts)
                self.weight1[local, :, :ffn].copy_(rank_slice(gate, 0, part, parts).t())
                self.weight1[local, :, ffn:].copy_(rank_slice(up, 0, part, parts).t())
                self.weight2[local].copy_(rank_slice(down, 1, part, parts).t())

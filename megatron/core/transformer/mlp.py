"""The SwiGLU feed-forward block, split over tensor-parallel ranks."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.core.ops import TrainOps
from megatron.core.parallel_state import ProcessGroups
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.weight_init import WeightInit
from megatron.core.transformer.transformer_config import TransformerConfig


class MLP(nn.Module):
    """[T/TP, H] -> [T/TP, H]: ``fc2(silu(gate) * up)``; fc1 holds this rank's rows of gate, then those of up."""

    def __init__(self, config: TransformerConfig, groups: ProcessGroups, ops: TrainOps, ffn_hidden_size: int) -> None:
        super().__init__()
        self.ffn_hidden_size = ffn_hidden_size
        self.swiglu = ops.swiglu
        self.linear_fc1 = ColumnParallelLinear(config, groups, ops, config.hidden_size, 2 * ffn_hidden_size, stride=2)
        self.linear_fc2 = RowParallelLinear(config, groups, ops, ffn_hidden_size, config.hidden_size)

    def forward(self, x_TH: Tensor) -> Tensor:
        y_TH: Tensor = self.linear_fc2(self.swiglu(self.linear_fc1(x_TH)))
        return y_TH

    def init_weights(self, init: WeightInit, name: str) -> None:
        """Fill the weights with this rank's parts of the tensors gate, up and down under ``name``."""
        hidden_size = self.linear_fc1.weight.shape[1]
        self.linear_fc1.copy_parts(
            init.normal(f"{name}.gate", self.ffn_hidden_size, hidden_size),
            init.normal(f"{name}.up", self.ffn_hidden_size, hidden_size),
        )
        self.linear_fc2.init_weights(init, f"{name}.down")

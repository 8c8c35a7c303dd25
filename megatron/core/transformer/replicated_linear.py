"""A linear layer that every tensor-parallel rank holds whole and runs on its own rows."""

from __future__ import annotations

import torch
from torch import nn

from megatron.core.ops import TrainOps
from megatron.core.tensor_parallel.layers import linear, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.weight_init import WeightInit
from megatron.core.transformer.transformer_config import TransformerConfig


class ReplicatedLinear(nn.Module):
    """``y = x W^T`` on the sequence shard [T/TP, in] -> [T/TP, out]; its gradient is partial over TP."""

    def __init__(self, config: TransformerConfig, ops: TrainOps, input_size: int, output_size: int) -> None:
        super().__init__()
        self.matmul = ops.matmul
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=False, sequence_parallel=config.sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.matmul)

    def init_weights(self, init: WeightInit, name: str) -> None:
        """Fill the weight with the tensor ``name``."""
        with torch.no_grad():
            self.weight.copy_(init.normal(name, *self.weight.shape))

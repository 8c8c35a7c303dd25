"""RMSNorm over the last dim, whole on every tensor-parallel rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.core.ops import TrainOps
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.weight_init import WeightInit
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` for x [..., size]; runs on the sequence shard, so its gradient is partial over TP."""

    def __init__(self, config: TransformerConfig, ops: TrainOps, size: int) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.rms_norm = ops.rms_norm
        self.weight = nn.Parameter(torch.ones(size, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=False, sequence_parallel=config.sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        return self.rms_norm(x, self.weight, self.eps)

    def init_weights(self, init: WeightInit, name: str) -> None:
        nn.init.ones_(self.weight)

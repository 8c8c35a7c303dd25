"""A linear layer on the sequence shard whose weight is split over tensor-parallel ranks by its outputs."""

from __future__ import annotations

import torch

from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import all_to_all_hp2sp


class SequenceToSequenceLinear(ColumnParallelLinear):
    """``y = x W^T`` from [T/TP, in] to [T/TP, out]: a rank makes its outputs of all tokens, which then change places.

    Beside a weight that every rank holds whole (``ReplicatedLinear``): 1/TP of the memory for weight, gradient and
    optimizer state, and no sum of gradients over TP, so copies cannot drift apart; x is gathered for it, once more in
    backward, and the outputs travel once each way.
    """

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        return all_to_all_hp2sp(super().forward(x, weight), self.group)

"""A linear layer on the sequence shard whose weight is split over tensor-parallel ranks by its outputs."""

from __future__ import annotations

import torch

from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import all_to_all_hp2sp


class SequenceToSequenceLinear(ColumnParallelLinear):
    """``y = x W^T`` from [T/TP, in] to [T/TP, out]: a rank computes its outputs of all tokens; an all-to-all follows.

    Compared to ``ReplicatedLinear``, weight, gradient and optimizer state take 1/TP of the memory, and no gradients are
    summed over TP, so copies cannot drift apart. In return x is gathered, once more in backward, and the outputs are
    exchanged once in each direction.
    """

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        return all_to_all_hp2sp(super().forward(x, weight), self.group)

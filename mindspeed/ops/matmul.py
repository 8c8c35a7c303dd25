"""Plain products: torch_npu runs torch's own matmul on the cube unit."""

from __future__ import annotations

import torch


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """See ``megatron.core.ops.contract.Matmul``; transposed operands are read as they lie."""
    return torch.mm(a, b)

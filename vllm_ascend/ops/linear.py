"""Matrix products: torch's own ops, which are the device's (aclnnMatmul, aclnnBatchMatMul).

Any size; float32, float16, bfloat16. Tolerance: 1e-5 (float32), 1e-2 (bfloat16), relative.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """See ``RolloutOps.linear``."""
    return F.linear(x_TI.to(weight_OI.dtype), weight_OI)


def head_linear(x_TNI: Tensor, weight_NIO: Tensor) -> Tensor:
    """See ``RolloutOps.head_linear``."""
    return torch.bmm(x_TNI.transpose(0, 1), weight_NIO).transpose(0, 1)

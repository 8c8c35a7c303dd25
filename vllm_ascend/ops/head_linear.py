"""A product for each head. The kernel (aclnnBatchMatMul) reads matrices in either order and copies any other view.

The rows of a step are copied here: without an explicit copy the kernel makes the same one. Copying a weight in every
step costs more than the product, so the table asks for weights that need none (``copies_strided_weights``).
"""

from __future__ import annotations

import torch
from torch import Tensor


def head_linear(x_TNI: Tensor, weight_NIO: Tensor) -> Tensor:
    """See ``RolloutOps.head_linear``."""
    return torch.bmm(x_TNI.transpose(0, 1).contiguous(), weight_NIO).transpose(0, 1)

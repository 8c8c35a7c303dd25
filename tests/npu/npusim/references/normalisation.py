"""RMSNorm, after the pages "torch_npu.npu_rms_norm" and "aclnnRmsNormGrad" of the Ascend documentation.

Simplified: one rounding at the end, whatever the kernel rounds in between.
"""

from __future__ import annotations

import torch
from torch import Tensor

from npusim.reference import reference
from npusim.references.checks import FLOATS, require


@reference("npu_rms_norm")
def rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """x [..., D...], gamma [D...] -> y like x, and 1/rms in float32 with the normalised dimensions kept as 1."""
    require(input.dtype in FLOATS and gamma.dtype in (input.dtype, torch.float32), "npu_rms_norm", "dtypes")
    require(input.numel() > 0, "npu_rms_norm", "wants a tensor that is not empty")
    dims = tuple(range(-gamma.dim(), 0))
    x = input.double()
    inverse_rms = 1 / torch.sqrt((x * x).mean(dims, keepdim=True) + epsilon)
    return (x * inverse_rms * gamma.double()).to(input.dtype), inverse_rms.float()


@reference("npu_rms_norm_backward")
def rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x (in its dtype) and of gamma (float32), from the 1/rms that the forward op returned."""
    dims = tuple(range(-gamma.dim(), 0))
    size = gamma.numel()
    x, grad, inverse_rms = input.double(), dy.double(), rstd.double()
    # d(1/rms)/dx = -x / (D rms^3)
    weighted = grad * gamma.double()
    along_x = (weighted * x).sum(dims, keepdim=True)
    grad_x = weighted * inverse_rms - x * inverse_rms**3 * along_x / size
    grad_gamma = (grad * x * inverse_rms).flatten(0, x.dim() - gamma.dim() - 1).sum(0)
    return grad_x.to(input.dtype), grad_gamma.float()

"""SwiGLU, after the pages "torch_npu.npu_swiglu" and "aclnnSwiGluGrad" of the Ascend documentation."""

from __future__ import annotations

import torch
from torch import Tensor

from npusim.reference import reference
from npusim.references.checks import require, require_floats


@reference("npu_swiglu")
def swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """x = (a | b) along ``dim`` -> a sigmoid(a) b, computed in float32."""
    require_floats("npu_swiglu", input)
    require(input.shape[dim] % 2 == 0, "npu_swiglu", f"wants an even size in dim {dim}, got {tuple(input.shape)}")
    require(input.numel() > 0, "npu_swiglu", "wants a tensor that is not empty")
    a, b = input.double().tensor_split(2, dim)
    return (a / (1 + torch.exp(-a)) * b).to(input.dtype)


@reference("npu_swiglu_backward")
def swiglu_backward(grad_output: Tensor, input: Tensor, dim: int = -1) -> Tensor:
    """(da | db) = (dy b s (1 + a (1 - s)) | dy a s) with s = sigmoid(a)."""
    require_floats("npu_swiglu_backward", grad_output, input)
    a, b = input.double().tensor_split(2, dim)
    grad, s = grad_output.double(), 1 / (1 + torch.exp(-a))
    return torch.cat((grad * b * s * (1 + a * (1 - s)), grad * a * s), dim).to(input.dtype)

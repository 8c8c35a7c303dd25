"""The experts' matmuls as one kernel each way.

Limits: float16, bfloat16 or float32, x and w in one dtype; at most 1024 experts. Row counts stay on the device: no
wait. Tolerance: 1e-2 (bfloat16), 1e-6 (float32), relative. Backward: ours; x's gradient is one more call of the same
kernel. w's gradient is added to a float32 ``main_grad`` by a kernel that multiplies and adds (float16 or bfloat16, at
most 128 experts). Without such a ``main_grad``, or that kernel, it is a third call, whose result autograd carries on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.utils import async_h2d

# Codes of npu_grouped_matmul.
SPLIT_ROWS, SPLIT_INNER = 0, 2  # group_type: groups are runs of x's rows, or of the contracted dimension
ONE_OUTPUT = 3  # split_item
COUNTS = 1  # group_list_type: rows per group, not running ends
ADDED_DTYPES, MAX_ADDED_EXPERTS = (torch.float16, torch.bfloat16), 128  # limits of npu_grouped_matmul_add_


def grouped_matmul(x: Tensor, w: Tensor, tokens_per_expert: Tensor, adds_to_main_grad: bool = True) -> Tensor:
    """See ``megatron.core.ops.contract.GroupedMatmul``."""
    counts = async_h2d(tokens_per_expert, x.device).to(torch.int64)
    out: Tensor = _GroupedMatmul.apply(x, w, counts, adds_to_main_grad)
    return out


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, counts: Tensor, adds_to_main_grad: bool) -> Tensor:
        ctx.save_for_backward(x, w, counts)
        ctx.adds_to_main_grad = adds_to_main_grad
        return _call(x, w, counts, SPLIT_ROWS) if x.shape[0] else x.new_empty(0, w.shape[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w, counts = ctx.saved_tensors
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = _call(grad, w.transpose(1, 2), counts, SPLIT_ROWS) if x.shape[0] else torch.empty_like(x)
        if ctx.needs_input_grad[1]:
            if ctx.adds_to_main_grad and has_float32_sums(w):
                _add_products(w.main_grad, x, counts, grad)
                w.grad_added_to_main_grad, grad_w = True, torch.empty_like(w)
            else:
                grad_w = _weight_grad(x, w, counts, grad)
        return grad_x, grad_w, None, None


def _weight_grad(x: Tensor, w: Tensor, counts: Tensor, grad: Tensor) -> Tensor:
    if not x.shape[0]:
        return torch.zeros_like(w)
    grad_w = _call(x.t(), grad, counts, SPLIT_INNER)
    # NPU-ADAPTATION(gmm-idle-expert): nothing says that the kernel writes the product of an expert
    # without rows; drop when CANN documents zeros there.
    grad_w.masked_fill_((counts == 0).view(-1, 1, 1), 0)
    # NPU-ADAPTATION END
    return grad_w


def has_float32_sums(w: Tensor) -> bool:
    """Whether the kernel that adds takes the gradient of ``w``, the parameter itself: autograd gives leaves back."""
    sums = getattr(w, "main_grad", None)
    has_sums = sums is not None and sums.dtype == torch.float32
    return has_sums and w.dtype in ADDED_DTYPES and w.shape[0] <= MAX_ADDED_EXPERTS


def _add_products(main_grad: Tensor, x: Tensor, counts: Tensor, grad: Tensor) -> None:
    """main_grad[e] += the product of expert e's rows of x, transposed, with those of grad."""
    import torch_npu

    assert main_grad.untyped_storage().nbytes(), "backward while the gradients are offloaded"
    if x.shape[0]:
        # The product wants int64; running sums of int32 are known to have a kernel on the vector cores.
        ends = counts.int().cumsum(0, dtype=torch.int32).long()
        torch_npu.npu_grouped_matmul_add_(main_grad, x, grad, ends)


def _call(x: Tensor, w: Tensor, counts: Tensor, group_type: int) -> Tensor:
    import torch_npu

    product: Tensor = torch_npu.npu_grouped_matmul(
        [x], [w], group_list=counts, split_item=ONE_OUTPUT, group_type=group_type, group_list_type=COUNTS
    )[0]
    return product

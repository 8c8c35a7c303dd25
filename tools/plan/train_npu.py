"""The training ops of Ascend as shapes: what `mindspeed.ops` allocates and keeps around torch_npu's kernels, no values.

What is plain torch there is used as it is; how many launches an entry makes is counted on the real ones in tests/npu.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.ops import TrainOps
from megatron.core.ops.contract import AdamwSettings
from megatron.core.ops.reference import in_float32
from megatron.core.ops.reference_moe import GroupedMatmulFunction
from mindspeed.ops.grouped_matmul import has_float32_sums
from tools.plan.launches import launched

STATISTICS_WIDTH = 8  # npu_fusion_attention keeps every row's maximum and sum in float32, eight times


def npu_table(table: TrainOps, pads_values: bool) -> TrainOps:
    """``table`` with Ascend's entries."""
    return replace(
        table,
        rms_norm=_rms_norm,
        swiglu=swiglu,
        rotary_interleaved=_rotary,
        core_attention=partial(_core_attention, pads_values=pads_values),
        grouped_matmul=_grouped_matmul,
        token_permute=_token_permute,
        token_unpermute=_token_unpermute,
        adamw_step=_adamw_step,
    )


class _Kept(torch.autograd.Function):
    """A kernel that keeps ``kept`` (its own statistics among them) and whose inputs have gradients of their shapes."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, kept: tuple[Tensor, ...], launches: tuple[int, int], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*kept)
        ctx.inputs = [(x.shape, x.dtype, x.device, x.requires_grad) for x in inputs]
        ctx.launches = launches[1]
        launched(launches[0])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.saved_tensors  # noqa: B018 - torch frees them here, as after a kernel
        launched(ctx.launches)
        grads = (
            torch.empty(shape, dtype=dtype, device=device) if is_wanted else None
            for shape, dtype, device, is_wanted in ctx.inputs
        )
        return None, None, None, *grads


def kernel(out: Tensor, kept: tuple[Tensor, ...], *inputs: Tensor, launches: tuple[int, int] = (1, 1)) -> Tensor:
    """``out`` as the result of a kernel on ``inputs``; ``launches`` of its forward and of its backward."""
    result: Tensor = _Kept.apply(out, kept, launches, *inputs)
    return result


def grouped_matmul(x: Tensor, w: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """All experts at once: on the meta device a loop over them would only take time."""
    out: Tensor = GroupedMatmulFunction.apply(x, w, [x.shape[0], *[0] * (w.shape[0] - 1)], _no_product)
    return out


def _no_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Compute nothing: the output has its shape already."""


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    inverse = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    backward = 1 if weight.dtype == torch.float32 else 2  # the weight's gradient is float32
    return kernel(torch.empty_like(x), (x, weight, inverse), x, weight, launches=(1, backward))


def swiglu(x: Tensor) -> Tensor:
    return kernel(x.new_empty(*x.shape[:-1], x.shape[-1] // 2), (x,), x)


def _rotary(x_TNR: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The kernel, angles for both members of a pair, and casts to float32 and back."""
    casts = 0 if x_TNR.dtype == torch.float32 else 2
    out = torch.empty(x_TNR.shape, dtype=x_TNR.dtype, device=x_TNR.device)
    return kernel(out, (cos, sin), x_TNR, launches=(3 + casts, 1 + casts))


def _core_attention(q: Tensor, k: Tensor, v: Tensor, *others: Any, pads_values: bool) -> Tensor:
    is_padded = pads_values and v.shape[-1] < q.shape[-1]
    wide_v = v.new_empty(*v.shape[:-1], q.shape[-1]) if is_padded else v
    statistics = tuple(
        torch.empty(q.shape[0], q.shape[1], STATISTICS_WIDTH, dtype=torch.float32, device=q.device) for _ in range(2)
    )
    wide_out = q.new_empty(*q.shape[:-1], wide_v.shape[-1])
    out = wide_out[..., : v.shape[-1]]
    launches = (2, 3) if is_padded else (1, 1)
    return kernel(out, (q, k, wide_v, wide_out, *statistics), q, k, v, launches=launches)


class GroupedMatmul(torch.autograd.Function):
    """The product of experts. Where the gradient of ``w`` is added to its ``main_grad``, which ``adds`` is asked in the
    backward, what autograd carries on has its shape. kept: by the kernel in addition.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, adds: Callable[[Tensor], bool], *kept: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, *kept)
        ctx.adds, ctx.num_others = adds, 1 + len(kept)
        launched(3)  # the counts travel and are cast
        return x.new_empty(x.shape[0], w.shape[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w, *_ = ctx.saved_tensors
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        grad_w = torch.empty_like(w) if ctx.needs_input_grad[1] else None
        launched(grad_x is not None)
        if grad_w is not None and ctx.adds(w):
            launched(4)  # running ends of the counts, too
            w.grad_added_to_main_grad = True
        elif grad_w is not None:
            launched(3)  # experts without rows are filled with zeros
        return grad_x, grad_w, *[None] * ctx.num_others


def _grouped_matmul(x: Tensor, w: Tensor, tokens_per_expert: Tensor) -> Tensor:
    out: Tensor = GroupedMatmul.apply(x, w, has_float32_sums)
    return out


def _token_permute(tokens_TH: Tensor, indices_TK: Tensor) -> tuple[Tensor, Tensor]:
    row_map = torch.empty(indices_TK.numel(), dtype=torch.int32, device=tokens_TH.device)
    out = tokens_TH.new_empty(indices_TK.numel(), tokens_TH.shape[1])
    return kernel(out, (row_map,), tokens_TH), row_map


def _token_unpermute(rows: Tensor, row_map: Tensor, probs_TK: Tensor | None = None, topk: int = 1) -> Tensor:
    if probs_TK is not None:
        return kernel(rows.new_empty(len(probs_TK), rows.shape[1]), (rows, row_map, probs_TK), rows, probs_TK)
    by_choice = kernel(torch.empty_like(rows), (row_map,), rows)
    return by_choice if topk == 1 else by_choice.unflatten(0, (-1, topk)).sum(1)


def _adamw_step(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, how: AdamwSettings, weight: Tensor | None = None
) -> None:
    with in_float32(grad, exp_avg, exp_avg_sq, scale=how.grad_scale):
        launched(2)  # the number of the step is a tensor there
    if weight is not None:
        weight.copy_(param)

"""The training ops of NVIDIA GPUs as shapes: what `megatron.core.ops.cuda` allocates and keeps around its kernels.

What is plain torch there is used as it is, attention's padding too; float32 attention and products are the
reference's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_formats.fp8 import BLOCK, FP8_DTYPE, num_blocks
from megatron.core.ops import TrainOps
from megatron.core.ops.contract import Attended
from megatron.core.ops.cuda.attention import DTYPES, FlashAttention
from megatron.core.ops.cuda.flash import Sequences
from megatron.core.ops.fused_adamw import adamw_step
from megatron.core.ops.reference_attention import whole_sequence_attention
from megatron.core.ops.reference_moe import expert_order
from megatron.core.tensor_parallel import collectives
from megatron.core.utils import async_h2d
from tools.plan.train_npu import GroupedMatmul, kernel, swiglu


def cuda_table(table: TrainOps, tp_comm_overlap: bool = False, has_fp8: bool = False) -> TrainOps:
    """``table``, whose attention float32 takes, with CUDA's entries; has_fp8: with FP8 products, also of float32."""
    flash = FlashAttention(_attend, _attend_grad)

    def choose(name: str, native: Any) -> Any:
        return lambda x, *others, **named: (native if x.dtype in DTYPES else getattr(table, name))(x, *others, **named)

    return replace(
        table,
        rms_norm=_rms_norm,
        swiglu=swiglu,
        rotary_interleaved=_rotary,
        core_attention=choose("core_attention", flash),
        shared_prompt_attention=lambda q, *others: (
            flash.shared_prompts(q, *others)
            if q.dtype in DTYPES
            else whole_sequence_attention(table.core_attention, q, *others)
        ),
        attention_block=choose("attention_block", flash.block),
        attention_block_grad=choose("attention_block_grad", flash.block_grad),
        grouped_matmul=_fp8_grouped_matmul if has_fp8 else choose("grouped_matmul", _grouped_matmul),
        token_permute=_token_permute,
        token_unpermute=_token_unpermute,
        log_sum_exp=_log_sum_exp,
        cross_entropy_grad=_cross_entropy_grad,
        adamw_step=adamw_step,
        tensor_parallel_overlap=_Overlap() if tp_comm_overlap else None,
        linear_products=_Fp8Products() if has_fp8 else None,
    )


class _Overlap:
    """What torch's ops join, one after another: the same collectives and results."""

    def prepare(self, group: dist.ProcessGroup) -> None:
        """Does nothing: no memory is mapped."""

    def all_gather_matmul(self, x: Tensor, w: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        gathered, _ = collectives.all_gather(x, group)
        return gathered, gathered @ w

    def matmul_reduce_scatter(self, x: Tensor, w: Tensor, group: dist.ProcessGroup) -> Tensor:
        return collectives.reduce_scatter(x @ w, group)[0]


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    inverse = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    return kernel(x.new_empty(x.shape), (x, weight, inverse), x, weight)


def _rotary(x_TNR: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return kernel(x_TNR.new_empty(x_TNR.shape), (cos, sin), x_TNR)


def _attend(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


def _attend_grad(
    grad_out: Tensor, attended: Attended, sequences: Sequences, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Flash attention adds up q's gradient in float32, and those of k and v for every query head."""
    q, k, v, *_ = attended
    sums_q = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    wide = [x.new_empty(x.shape[0], q.shape[1], x.shape[2]) for x in (k, v) if x.shape[1] != q.shape[1]]
    grads = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    del sums_q, wide
    return grads


def _grouped_matmul(x: Tensor, w: Tensor, tokens_per_expert: Tensor) -> Tensor:
    ends = async_h2d(tokens_per_expert, x.device).cumsum(0, dtype=torch.int32)
    out: Tensor = GroupedMatmul.apply(x, w, lambda w: getattr(w, "main_grad", None) is not None, ends)
    return out


class _Fp8Products:
    """Quantised copies live for one product; what is added to ``main_grad`` is as in ``GroupedMatmul``."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return _fp8_multiply(x, w.unsqueeze(0), w.shape[0])

    def dgrad(self, grad: Tensor, w: Tensor) -> Tensor:
        return _fp8_multiply(grad, w.unsqueeze(0), w.shape[1])

    def wgrad(self, grad: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return _fp8_weight_grad(grad, x, w, num_experts=1)


class _Fp8GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return _fp8_multiply(x, w, w.shape[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        grad_x = _fp8_multiply(grad, w, w.shape[1]) if ctx.needs_input_grad[0] else None
        grad_w = _fp8_weight_grad(x, grad, w, len(w)) if ctx.needs_input_grad[1] else None
        return grad_x, grad_w


def _fp8_grouped_matmul(x: Tensor, w: Tensor, tokens_per_expert: Tensor) -> Tensor:
    out: Tensor = _Fp8GroupedMatmul.apply(x, w)
    return out


def _fp8_multiply(x: Tensor, w: Tensor, width: int) -> Tensor:
    (num_rows, inner), (num_experts, *sides) = x.shape, w.shape
    out = x.new_empty(num_rows, width)
    x_copy = _fp8_copy(x.numel(), num_blocks(inner) * num_rows, x.device)
    w_copy = _fp8_copy(w.numel(), num_experts * num_blocks(sides[0]) * num_blocks(sides[1]), x.device)
    del x_copy, w_copy
    return out


def _fp8_copy(num_values: int, num_scales: int, device: torch.device) -> tuple[Tensor, Tensor]:
    values = torch.empty(num_values, dtype=FP8_DTYPE, device=device)
    return values, torch.empty(num_scales, dtype=torch.float32, device=device)


def _fp8_weight_grad(a: Tensor, b: Tensor, w: Tensor, num_experts: int) -> Tensor:
    """An expert's last block of tokens is filled up."""
    out = torch.empty_like(w)
    blocks = num_blocks(len(a)) + num_experts - 1
    copies = [_fp8_copy(blocks * BLOCK * x.shape[1], blocks * x.shape[1], x.device) for x in (a, b)]
    del copies
    if getattr(w, "main_grad", None) is not None:
        w.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return out


def _token_permute(tokens_TH: Tensor, indices_TK: Tensor) -> tuple[Tensor, Tensor]:
    _, row_map = expert_order(indices_TK)
    return kernel(tokens_TH.new_empty(indices_TK.numel(), tokens_TH.shape[1]), (row_map,), tokens_TH), row_map


def _token_unpermute(rows: Tensor, row_map: Tensor, probs_TK: Tensor | None = None, topk: int = 1) -> Tensor:
    if probs_TK is None:
        return kernel(rows.new_empty(len(rows) // topk, rows.shape[1]), (row_map,), rows)
    return kernel(rows.new_empty(len(probs_TK), rows.shape[1]), (rows, row_map, probs_TK), rows, probs_TK)


def _log_sum_exp(logits_TV: Tensor, with_mean: bool = False) -> tuple[Tensor, Tensor | None]:
    lse_T = torch.empty(len(logits_TV), dtype=torch.float32, device=logits_TV.device)
    return lse_T, torch.empty_like(lse_T) if with_mean else None


def _cross_entropy_grad(logits_TV: Tensor, lse_T: Tensor, target_T: Tensor, grad_T: Tensor) -> Tensor:
    return logits_TV.new_empty(logits_TV.shape)

"""Plain-torch ops: the specification that every device's table must equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.ops.contract import AdamwSettings, TrainOps
from megatron.core.ops.reference_attention import attention_block, attention_block_grad, core_attention
from megatron.core.ops.reference_moe import grouped_matmul, token_permute, token_unpermute, topk_router
from megatron.core.ops.reference_vocab import cross_entropy_grad, log_sum_exp


def reference_ops() -> TrainOps:
    """The table in which every entry is the reference."""
    functions: list[Callable[..., Any]] = [rms_norm, swiglu, rotary_interleaved, matmul]
    functions += [core_attention, attention_block, attention_block_grad]
    functions += [grouped_matmul, token_permute, token_unpermute, topk_router]
    functions += [log_sum_exp, cross_entropy_grad, adamw_step]
    entries: dict[str, Any] = {function.__name__: function for function in functions}
    return TrainOps(**entries, names=dict.fromkeys(entries, "reference"))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``contract.RmsNorm``; rounds to x's dtype before the weight is applied, as transformers does."""
    x_fp32 = _at_least_fp32(x)
    inverse_rms = torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + eps)
    return (x_fp32 * inverse_rms).to(x.dtype) * weight


def swiglu(x: Tensor) -> Tensor:
    """See ``contract.Swiglu``."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """See ``contract.Matmul``."""
    return torch.mm(a, b)


def rotary_interleaved(x_TNR: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See ``contract.RotaryInterleaved``; a pair is one complex number, which is several times quicker on a CPU."""
    pairs = _at_least_fp32(x_TNR).unflatten(-1, (-1, 2)).contiguous()
    turn = torch.complex(cos, sin).unsqueeze(1)
    return torch.view_as_real(torch.view_as_complex(pairs) * turn).flatten(-2).to(x_TNR.dtype)


def adamw_step(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, how: AdamwSettings, weight: Tensor | None = None
) -> None:
    """See ``contract.AdamwStep``; needs one temporary of the parameter's size."""
    beta1, beta2 = how.betas
    with in_float32(grad, exp_avg, exp_avg_sq, scale=how.grad_scale) as (wide_grad, mean, square):
        mean.lerp_(wide_grad, 1 - beta1)
        square.mul_(beta2).addcmul_(wide_grad, wide_grad, value=1 - beta2)
        denominator = (square / (1 - beta2**how.step)).sqrt_().add_(how.eps)
        param.mul_(1 - how.lr * how.weight_decay)
        param.addcdiv_(mean, denominator, value=-how.lr / (1 - beta1**how.step))
    if weight is not None:
        weight.copy_(param)


@contextmanager
def in_float32(grad: Tensor, *moments: Tensor, scale: float) -> Iterator[list[Tensor]]:
    """Give grad, multiplied by ``scale``, and the moments in float32 to a step that changes the moments in place."""
    if scale != 1.0:
        grad.mul_(scale)
    wide = [tensor.float() for tensor in moments]  # itself when it is float32
    yield [grad.float(), *wide]
    for stored, new in zip(moments, wide, strict=True):
        if stored is not new:
            stored.copy_(new)


def _at_least_fp32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()

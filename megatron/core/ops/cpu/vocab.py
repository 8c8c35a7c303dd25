"""Sums over logits and the gradient of cross entropy on a CPU: one pass over memory, without float32 copies."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.ops import reference_vocab
from megatron.core.ops.cpu.build import has_dtype, run


def log_sum_exp(logits_TV: Tensor, with_mean: bool = False) -> tuple[Tensor, Tensor | None]:
    """See ``contract.LogSumExp``."""
    if not has_dtype(logits_TV):
        return reference_vocab.log_sum_exp(logits_TV, with_mean)
    rows = logits_TV if logits_TV.stride(1) == 1 else logits_TV.contiguous()
    lse_T = rows.new_empty(len(rows), dtype=torch.float32)
    mean_T = torch.empty_like(lse_T) if with_mean else None
    run("log_sum_exp", rows.dtype, rows, lse_T, mean_T, *rows.shape, rows.stride(0))
    return lse_T, mean_T


def cross_entropy_grad(logits_TV: Tensor, lse_T: Tensor, target_T: Tensor, grad_T: Tensor) -> Tensor:
    """See ``contract.CrossEntropyGrad``."""
    if not has_dtype(logits_TV):
        return reference_vocab.cross_entropy_grad(logits_TV, lse_T, target_T, grad_T)
    rows = logits_TV if logits_TV.stride(1) == 1 else logits_TV.contiguous()
    of_tokens = lse_T.contiguous(), target_T.contiguous(), grad_T.contiguous()
    out_TV = rows.new_empty(rows.shape)
    run("cross_entropy_grad", rows.dtype, rows, *of_tokens, out_TV, *rows.shape, rows.stride(0))
    return out_TV

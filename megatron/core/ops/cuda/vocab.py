"""Sums over logits and the gradient of cross entropy: one pass over memory, without float32 copies.

The kernels take float32, bfloat16 and float16; other dtypes go through the reference. Tolerance: the contract's. A
logit of -inf counts nothing in the mean, where the reference returns no number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.ops import reference_vocab
from megatron.core.ops.cuda.kernels import vocab as kernels
from megatron.core.ops.cuda.launch import block_of, cdiv, has_dtype

MAX_BLOCK = 4096  # logits that a program takes at a time


def log_sum_exp(logits_TV: Tensor, with_mean: bool = False) -> tuple[Tensor, Tensor | None]:
    """See ``contract.LogSumExp``."""
    if not has_dtype(logits_TV):
        return reference_vocab.log_sum_exp(logits_TV, with_mean)
    rows = logits_TV if logits_TV.stride(1) == 1 else logits_TV.contiguous()
    num_tokens, vocab = rows.shape
    lse_T = rows.new_empty(num_tokens, dtype=torch.float32)
    mean_T = torch.empty_like(lse_T) if with_mean else None
    if num_tokens:
        block = block_of(vocab, MAX_BLOCK)
        kernels.log_sum_exp[(num_tokens,)](
            rows, lse_T, mean_T, rows.stride(0), VOCAB=vocab, WITH_MEAN=with_mean, BLOCK=block, num_warps=8
        )
    return lse_T, mean_T


def cross_entropy_grad(logits_TV: Tensor, lse_T: Tensor, target_T: Tensor, grad_T: Tensor) -> Tensor:
    """See ``contract.CrossEntropyGrad``."""
    if not has_dtype(logits_TV):
        return reference_vocab.cross_entropy_grad(logits_TV, lse_T, target_T, grad_T)
    rows = logits_TV if logits_TV.stride(1) == 1 else logits_TV.contiguous()
    num_tokens, vocab = rows.shape
    out_TV = rows.new_empty(rows.shape)
    if num_tokens:
        block = block_of(vocab, MAX_BLOCK)
        of_tokens = lse_T.contiguous(), target_T.contiguous(), grad_T.contiguous()
        kernels.cross_entropy_grad[(num_tokens, cdiv(vocab, block))](
            rows, *of_tokens, out_TV, rows.stride(0), vocab, BLOCK=block, num_warps=8
        )
    return out_TV

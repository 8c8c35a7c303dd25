"""Sums over the logits of a token, and the gradient of its cross entropy, in float32 over chunks of tokens.

All float32 temporaries together stay below ``MAX_TEMPORARY_BYTES`` whatever T and V are (one row, if a row alone is
more). Letters: T tokens, V vocabulary (local part).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 22  # logits of one chunk: 16 MiB in float32
MAX_TEMPORARY_BYTES = 4 * 4 * CHUNK_ELEMENTS  # the chunk in float32, its probabilities and what the kernels make of it


def log_sum_exp(logits_TV: Tensor, with_mean: bool = False) -> tuple[Tensor, Tensor | None]:
    """See ``contract.LogSumExp``."""
    lse_parts, mean_parts = [], []
    for chunk in chunks(logits_TV):
        lse_parts.append(chunk.logsumexp(-1))
        if with_mean:
            mean_parts.append(torch.linalg.vecdot((chunk - lse_parts[-1].unsqueeze(1)).exp_(), chunk))
    return torch.cat(lse_parts), torch.cat(mean_parts) if with_mean else None


def cross_entropy_grad(logits_TV: Tensor, lse_T: Tensor, target_T: Tensor, grad_T: Tensor) -> Tensor:
    """See ``contract.CrossEntropyGrad``."""
    out_TV = torch.empty_like(logits_TV)
    size = chunk_size(logits_TV)
    of_tokens = (x.split(size) for x in (out_TV, lse_T, target_T, grad_T))
    for chunk, out, lse, target, grad in zip(chunks(logits_TV), *of_tokens, strict=True):
        _chunk_grad(chunk, lse, target, grad, out)
    return out_TV


# The temporaries of one chunk live in a function of their own: they must be gone when the next chunk is made.


def _chunk_grad(chunk: Tensor, lse: Tensor, target: Tensor, grad: Tensor, out: Tensor) -> None:
    """Write to ``out``, and compute there if it is of the chunk's dtype."""
    probs = torch.sub(chunk, lse.unsqueeze(1), out=out if out.dtype == chunk.dtype else None).exp_()
    is_here = (target >= 0).to(probs.dtype).unsqueeze(1)
    probs.scatter_add_(1, target.clamp(min=0).unsqueeze(1), -is_here).mul_(grad.unsqueeze(1))
    if probs is not out:
        out.copy_(probs)


def chunk_size(logits_TV: Tensor) -> int:
    """Tokens of one chunk."""
    num_tokens, local_vocab = logits_TV.shape
    size = num_tokens
    # NPU-ADAPTATION(vocab-chunks): a micro-batch of DeepSeek-V3 has gigabytes of logits, and no fused kernel takes a
    # split vocabulary, so float32 copies of them would decide what fits; drop when such a kernel exists.
    size = min(size, CHUNK_ELEMENTS // max(1, local_vocab))
    # NPU-ADAPTATION END
    return max(1, size)


def chunks(logits_TV: Tensor) -> Iterator[Tensor]:
    """Chunks of tokens in float32, one alive at a time; float32 logits are not copied, so never write to a chunk."""
    for chunk in logits_TV.split(chunk_size(logits_TV)):
        yield chunk if chunk.dtype == torch.float64 else chunk.float()

"""Log-probabilities and entropy of logits whose vocabulary is split over tensor-parallel ranks.

Both work in float32 over chunks of tokens. Memory: forward and backward keep the logits themselves and some [T]
vectors, no copy of the logits; backward makes one gradient in the logits' dtype; all float32 temporaries together stay
below ``MAX_TEMPORARY_BYTES`` whatever T and V are (one row, if a row alone is more). Letters: T tokens, V vocabulary
(local part).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.tensor_parallel import collectives

CHUNK_ELEMENTS = 1 << 22  # logits of one chunk: 16 MiB in float32
MAX_TEMPORARY_BYTES = 4 * 4 * CHUNK_ELEMENTS  # the chunk in float32, its probabilities and what the kernels make of it


def vocab_parallel_cross_entropy(logits_TV: Tensor, target_T: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
    """Loss of each token, float32 [T]: ``logsumexp(logits) - logits[target]``; log-prob is its negative.

    logits_TV [T, V/TP] of any float dtype, target_T int64 [T] with global ids; all ranks of ``tp_group`` must call it.
    """
    loss_T: Tensor = _CrossEntropy.apply(logits_TV, target_T, tp_group)
    return loss_T


def vocab_parallel_entropy(logits_TV: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
    """Entropy of each token's distribution in nats, float32 [T]: ``-sum_v p_v log p_v``, p = softmax(logits_TV)."""
    entropy_T: Tensor = _Entropy.apply(logits_TV, tp_group)
    return entropy_T


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, target_T: Tensor, group: dist.ProcessGroup) -> Tensor:
        local_T, is_local_T = _local_targets(target_T, logits_TV.shape[1], group)
        at_target_T = logits_TV.gather(1, local_T.unsqueeze(1)).squeeze(1).to(_math_dtype(logits_TV))
        lse_T = torch.cat([chunk.logsumexp(-1) for chunk in _chunks(logits_TV)])
        if group.size() > 1:
            lse_T, at_target_T = _combine(lse_T, at_target_T.masked_fill(~is_local_T, 0.0), group)
        ctx.save_for_backward(logits_TV, local_T, is_local_T, lse_T)
        return lse_T - at_target_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        logits_TV, local_T, is_local_T, lse_T = ctx.saved_tensors
        grad_TV = torch.empty_like(logits_TV)
        size = _chunk_size(logits_TV)
        for chunk, out, lse, grad, local, is_local in zip(
            _chunks(logits_TV),
            grad_TV.split(size),
            lse_T.split(size),
            grad_T.split(size),
            local_T.split(size),
            is_local_T.split(size),
            strict=True,
        ):
            _cross_entropy_grad(chunk, lse, local, is_local, grad, out)
        return grad_TV, None, None


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, group: dist.ProcessGroup) -> Tensor:
        lse_parts, mean_parts = [], []
        for chunk in _chunks(logits_TV):
            lse = chunk.logsumexp(-1)
            lse_parts.append(lse)
            mean_parts.append(torch.linalg.vecdot((chunk - lse.unsqueeze(1)).exp_(), chunk))
        lse_T, mean_T = torch.cat(lse_parts), torch.cat(mean_parts)  # mean_T: expected logit under the local softmax
        if group.size() > 1:
            local_lse_T = lse_T
            lse_T, _ = _combine(lse_T, torch.zeros_like(lse_T), group)
            mean_T = mean_T * (local_lse_T - lse_T).exp()
            collectives.all_reduce(mean_T, group)
        entropy_T = lse_T - mean_T
        ctx.save_for_backward(logits_TV, lse_T, entropy_T)
        return entropy_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        logits_TV, lse_T, entropy_T = ctx.saved_tensors
        grad_TV = torch.empty_like(logits_TV)
        size = _chunk_size(logits_TV)
        for chunk, out, lse, entropy, grad in zip(
            _chunks(logits_TV),
            grad_TV.split(size),
            lse_T.split(size),
            entropy_T.split(size),
            grad_T.split(size),
            strict=True,
        ):
            out.copy_(_entropy_grad(chunk, lse, entropy).mul_(grad.unsqueeze(1)))
        return grad_TV, None


# The temporaries of one chunk live in a function of their own: they must be gone when the next chunk is made.


def _cross_entropy_grad(chunk: Tensor, lse: Tensor, local: Tensor, is_local: Tensor, grad: Tensor, out: Tensor) -> None:
    """Write to ``out``: d(-log p_target)/dlogit_v = p_v - [v is the target], times ``grad``; there, if in its dtype."""
    probs = torch.sub(chunk, lse.unsqueeze(1), out=out if out.dtype == chunk.dtype else None).exp_()
    probs.scatter_add_(1, local.unsqueeze(1), -is_local.to(probs.dtype).unsqueeze(1)).mul_(grad.unsqueeze(1))
    if probs is not out:
        out.copy_(probs)


def _entropy_grad(chunk: Tensor, lse: Tensor, entropy: Tensor) -> Tensor:
    """dH/dlogit_v = -p_v (log p_v + H)."""
    log_probs = chunk - lse.unsqueeze(1)
    probs = log_probs.exp()
    return log_probs.add_(entropy.unsqueeze(1)).mul_(probs).neg_()


def _math_dtype(logits_TV: Tensor) -> torch.dtype:
    return torch.float64 if logits_TV.dtype == torch.float64 else torch.float32


def _chunk_size(logits_TV: Tensor) -> int:
    """Tokens of one chunk."""
    num_tokens, local_vocab = logits_TV.shape
    size = num_tokens
    # NPU-ADAPTATION(vocab-chunks): a micro-batch of DeepSeek-V3 has gigabytes of logits, and no fused kernel takes a
    # split vocabulary, so float32 copies of them would decide what fits; drop when such a kernel exists.
    size = min(size, CHUNK_ELEMENTS // max(1, local_vocab))
    # NPU-ADAPTATION END
    return max(1, size)


def _chunks(logits_TV: Tensor) -> Iterator[Tensor]:
    """Chunks of tokens in float32, one alive at a time; float32 logits are not copied, so never write to a chunk."""
    for chunk in logits_TV.split(_chunk_size(logits_TV)):
        yield chunk.to(_math_dtype(logits_TV))


def _local_targets(target_T: Tensor, local_vocab: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Target ids within this rank's part of the vocabulary (0 where they are elsewhere), and where they are inside."""
    local_T = target_T - group.rank() * local_vocab
    is_local_T = (local_T >= 0) & (local_T < local_vocab)
    return local_T.masked_fill(~is_local_T, 0), is_local_T


def _combine(lse_T: Tensor, summed_T: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Global log-sum-exp from local ones, and ``summed_T`` added over the ranks, in two all-reduces."""
    max_T = lse_T.clone()
    collectives.all_reduce(max_T, group, dist.ReduceOp.MAX)
    both = torch.stack([(lse_T - max_T).exp(), summed_T])
    collectives.all_reduce(both, group)
    return max_T + both[0].log(), both[1]

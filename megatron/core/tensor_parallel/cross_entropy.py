"""Log-probabilities and entropy of logits whose vocabulary is split over tensor-parallel ranks.

Both work in float32. Memory: forward and backward keep the logits themselves and some [T] vectors, no copy of the
logits; backward makes one gradient in the logits' dtype; float32 temporaries are those of ``ops.reference_vocab`` at
most. Letters: T tokens, V vocabulary (local part).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.ops.contract import TrainOps
from megatron.core.ops.reference_vocab import chunk_size, chunks
from megatron.core.tensor_parallel import collectives


def vocab_parallel_cross_entropy(
    logits_TV: Tensor, target_T: Tensor, tp_group: dist.ProcessGroup, ops: TrainOps
) -> Tensor:
    """Loss of each token, float32 [T]: ``logsumexp(logits) - logits[target]``; log-prob is its negative.

    logits_TV [T, V/TP] of any float dtype, target_T int64 [T] with global ids; all ranks of ``tp_group`` must call it.
    """
    loss_T: Tensor = _CrossEntropy.apply(logits_TV, target_T, tp_group, ops, False)
    return loss_T


def vocab_parallel_cross_entropy_and_entropy(
    logits_TV: Tensor, target_T: Tensor, tp_group: dist.ProcessGroup, ops: TrainOps
) -> tuple[Tensor, Tensor]:
    """Both from one pass over the logits; the entropy, which is here to be looked at, has no gradient."""
    loss_T, entropy_T = _CrossEntropy.apply(logits_TV, target_T, tp_group, ops, True)
    return loss_T, entropy_T


def vocab_parallel_entropy(logits_TV: Tensor, tp_group: dist.ProcessGroup, ops: TrainOps) -> Tensor:
    """Entropy of each token's distribution in nats, float32 [T]: ``-sum_v p_v log p_v``, p = softmax(logits_TV)."""
    entropy_T: Tensor = _Entropy.apply(logits_TV, tp_group, ops)
    return entropy_T


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, target_T: Tensor, group: dist.ProcessGroup, ops: TrainOps, with_entropy: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        local_T = _local_targets(target_T, logits_TV.shape[1], group)
        lse_T, mean_T = ops.log_sum_exp(logits_TV, with_mean=with_entropy)
        at_target_T = logits_TV.gather(1, local_T.clamp(min=0).unsqueeze(1)).squeeze(1).to(lse_T.dtype)
        if group.size() > 1:
            lse_T, at_target_T, mean_T = _combine(lse_T, at_target_T.masked_fill(local_T < 0, 0.0), mean_T, group)
        ctx.save_for_backward(logits_TV, local_T, lse_T)
        ctx.ops = ops
        if mean_T is None:
            return lse_T - at_target_T
        entropy_T = lse_T - mean_T
        ctx.mark_non_differentiable(entropy_T)
        return lse_T - at_target_T, entropy_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        logits_TV, local_T, lse_T = ctx.saved_tensors
        return ctx.ops.cross_entropy_grad(logits_TV, lse_T, local_T, grad_T), None, None, None, None


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, group: dist.ProcessGroup, ops: TrainOps) -> Tensor:
        lse_T, mean_T = ops.log_sum_exp(logits_TV, with_mean=True)  # mean_T: expected logit under the local softmax
        if group.size() > 1:
            lse_T, _, mean_T = _combine(lse_T, torch.zeros_like(lse_T), mean_T, group)
        assert mean_T is not None
        entropy_T = lse_T - mean_T
        ctx.save_for_backward(logits_TV, lse_T, entropy_T)
        return entropy_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        logits_TV, lse_T, entropy_T = ctx.saved_tensors
        grad_TV = torch.empty_like(logits_TV)
        of_tokens = (x.split(chunk_size(logits_TV)) for x in (grad_TV, lse_T, entropy_T, grad_T))
        for chunk, out, lse, entropy, grad in zip(chunks(logits_TV), *of_tokens, strict=True):
            out.copy_(_entropy_grad(chunk, lse, entropy).mul_(grad.unsqueeze(1)))
        return grad_TV, None, None


def _entropy_grad(chunk: Tensor, lse: Tensor, entropy: Tensor) -> Tensor:
    """dH/dlogit_v = -p_v (log p_v + H); a function of its own, so that its temporaries are gone before the next one."""
    log_probs = chunk - lse.unsqueeze(1)
    probs = log_probs.exp()
    return log_probs.add_(entropy.unsqueeze(1)).mul_(probs).neg_()


def _local_targets(target_T: Tensor, local_vocab: int, group: dist.ProcessGroup) -> Tensor:
    """Target ids within this rank's part of the vocabulary, -1 where they are elsewhere."""
    local_T = target_T - group.rank() * local_vocab
    return local_T.masked_fill((local_T < 0) | (local_T >= local_vocab), -1)


def _combine(
    lse_T: Tensor, at_target_T: Tensor, mean_T: Tensor | None, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The log-sum-exp, the target's logit and the expected logit of the whole vocabulary, in two all-reduces."""
    max_T = lse_T.clone()
    collectives.all_reduce(max_T, group, dist.ReduceOp.MAX)
    weight_T = (lse_T - max_T).exp()
    sums = torch.stack([weight_T, at_target_T, *([] if mean_T is None else [weight_T * mean_T])])
    collectives.all_reduce(sums, group)
    return max_T + sums[0].log(), sums[1], None if mean_T is None else sums[2] / sums[0]

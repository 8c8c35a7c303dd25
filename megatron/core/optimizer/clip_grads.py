"""The global gradient norm and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def local_square_sum(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of the squares of all elements, an fp32 scalar; ``grads`` must not be empty."""
    norms = torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads])
    return norms.square().sum()


def get_grad_norm_fp32(square_sum: torch.Tensor, grad_stats_parallel_group: dist.ProcessGroup) -> float:
    """Root of the sum over the group of ``square_sum``; each element must have been counted on exactly one rank."""
    total = square_sum.clone()
    if dist.get_world_size(grad_stats_parallel_group) > 1:
        dist.all_reduce(total, group=grad_stats_parallel_group)
    return total.sqrt().item()


def clip_grad_by_total_norm_fp32(grads: Sequence[torch.Tensor], max_norm: float, total_norm: float) -> None:
    """Scale ``grads`` in place by max_norm / (total_norm + 1e-6) when that is below 1."""
    scale = max_norm / (total_norm + 1e-6)
    if scale < 1.0:
        for grad in grads:
            grad.mul_(scale)

"""Attention of a rank's queries to one block of keys and values, and its gradient; blocks are what travels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.core.ops import TrainOps

# keys [k, M, D], values [k, M, Dv], and where all heads share a part of their key that part [k, 1, R].
Block = tuple[torch.Tensor, ...]


def keys_of(block: Block) -> torch.Tensor:
    """[k, M, D+R]: the shared part is the end of every head's key."""
    if len(block) == 2:
        return block[0]
    return torch.cat([block[0], block[2].expand(-1, block[0].shape[1], -1)], dim=-1)


def take_rows(block: Block, rows: torch.Tensor) -> Block:
    """The block of some of the tokens."""
    return tuple(x.index_select(0, rows) for x in block)


def widen(x: torch.Tensor) -> torch.Tensor:
    """What sums of several terms are kept in."""
    return x if x.dtype == torch.float64 else x.float()


@dataclass(frozen=True)
class BlockAttention:
    """The pair of ops for one softmax scale; ``bounds``: those of the queries and of the keys."""

    ops: TrainOps
    scale: float

    def forward(
        self, q: torch.Tensor, block: Block, bounds: tuple[torch.Tensor, torch.Tensor], causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> out [q, N, Dv], lse [q, N]."""
        return self.ops.attention_block(q, keys_of(block), block[1], *bounds, self.scale, causal)

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        block: Block,
        out_and_lse: Sequence[torch.Tensor],
        bounds: tuple[torch.Tensor, torch.Tensor],
        causal: bool,
    ) -> tuple[torch.Tensor, Block]:
        """-> gradients of q and of the block; ``out_and_lse`` are those of all keys."""
        out, lse = out_and_lse
        grad_q, grad_k, grad_v = self.ops.attention_block_grad(
            grad_out, q, keys_of(block), block[1], out, lse, *bounds, self.scale, causal
        )
        if len(block) == 2:
            return grad_q, (grad_k, grad_v)
        size = block[0].shape[-1]
        grad_shared = widen(grad_k[..., size:]).sum(1, keepdim=True).to(grad_k.dtype)
        return grad_q, (grad_k[..., :size].contiguous(), grad_v, grad_shared)


def merge(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> None:
    """Join, in place, the attention to two sets of keys: each output counts by its share of the denominator."""
    total = torch.logaddexp(lse, more_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1)).add_(widen(more) * (more_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)

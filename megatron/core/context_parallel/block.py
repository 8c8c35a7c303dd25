"""Attention of a rank's queries to one block of keys and values, and its gradient; ranks send one another blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.ops import TrainOps
from megatron.core.ops.contract import Bounds

# A block of heads: keys [k, M, D], values [k, M, Dv] and, where all heads share a part of their key, that part
# [k, 1, R]. A block of latents: the latents [k, C] of keys and values, and the shared part [k, 1, R].
Block = tuple[Tensor, ...]


def keys_of(block: Block) -> Tensor:
    """[k, M, D+R]: the shared part is the end of every head's key."""
    if len(block) == 2:
        return block[0]
    return torch.cat([block[0], block[2].expand(-1, block[0].shape[1], -1)], dim=-1)


def take_rows(block: Block, rows: Tensor) -> Block:
    """The block of some of the tokens."""
    return tuple(x.index_select(0, rows) for x in block)


def widen(x: Tensor) -> Tensor:
    """Return x in the dtype in which sums of several terms are accumulated."""
    return x if x.dtype == torch.float64 else x.float()


@dataclass(frozen=True)
class BlockAttention:
    """The pair of ops for one softmax scale.

    With a ``weight`` [M * (D+Dv), C] a block holds latents: each head's keys (of ``key_size``) and values are
    ``latent weight^T``, made where a block is needed and not kept.
    """

    ops: TrainOps
    scale: float
    key_size: int = 0
    value_size: int = 0

    def forward(
        self, q: Tensor, block: Block, weight: Tensor | None, bounds: Bounds, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """-> out [q, N, Dv], lse [q, N]."""
        heads = self.heads(block, weight)
        return self.ops.attention_block(q, keys_of(heads), heads[1], bounds, self.scale, causal)

    def backward(
        self, queries: Sequence[Tensor], block: Block, weight: Tensor | None, bounds: Bounds, causal: bool
    ) -> tuple[Tensor, Block, Tensor | None]:
        """-> gradients of q, block and weight; queries: the output's gradient, q, and out and lse of all keys."""
        grad_out, q, out, lse = queries
        heads = self.heads(block, weight)
        grad_q, grad_k, grad_v = self.ops.attention_block_grad(
            grad_out, (q, keys_of(heads), heads[1], out, lse), bounds, self.scale, causal
        )
        if len(heads) == 2:
            return grad_q, (grad_k, grad_v), None
        size = heads[0].shape[-1]
        grad_shared = widen(grad_k[..., size:]).sum(1, keepdim=True).to(grad_k.dtype)
        if weight is None:
            return grad_q, (grad_k[..., :size].contiguous(), grad_v, grad_shared), None
        grad_kv = torch.cat([grad_k[..., :size], grad_v], dim=-1).flatten(1)
        grad_latent = self.ops.matmul(grad_kv, weight)
        return grad_q, (grad_latent, grad_shared), self.ops.matmul(grad_kv.t(), block[0])

    def heads(self, block: Block, weight: Tensor | None) -> Block:
        """The block as keys, values and the shared part of the keys."""
        if weight is None:
            return block
        latent, shared = block
        kv = self.ops.matmul(latent, weight.t()).unflatten(1, (-1, self.key_size + self.value_size))
        k, v = kv.split([self.key_size, self.value_size], dim=-1)
        return k, v, shared

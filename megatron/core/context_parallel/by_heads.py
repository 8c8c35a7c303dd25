"""Attention with each rank taking all tokens of some heads (``cp_comm_type`` "a2a"; DeepSpeed-Ulysses, 2309.14509)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.context_parallel.block import Block, BlockAttention, keys_of
from megatron.core.context_parallel.zigzag import ContextShard
from megatron.core.ops import TrainOps
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import MatmulProducts, linear
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region


@dataclass(frozen=True)
class HeadExchange:
    """The group and bounds for the exchange between the ranks of one micro-batch."""

    ops: TrainOps
    scale: float
    params: PackedSeqParams
    shard: ContextShard
    group: dist.ProcessGroup

    def attend(self, q: Tensor, block: Block) -> Tensor:
        """q [t, N, Dq] and this rank's own block -> [t, N, Dv]; N is a multiple of CP, collective over ``group``.

        If there are fewer key heads than ranks, they are repeated before they are sent. The part of the keys that all
        heads share is sent to every rank once.
        """
        by_head = [q, *(_at_least(x, self.group.size()) for x in block[:2])]
        q_TND, k_TMD, v_TMD = self._all_tokens(by_head)
        shared = tuple(self._gather(x) for x in block[2:])
        return self._own_tokens(self._core_attention(q_TND, (k_TMD, v_TMD, *shared)))

    def attend_to_latents(self, q: Tensor, block: Block, weight: Tensor, attention: BlockAttention) -> Tensor:
        """The same with a block of latents, which go to every rank; each makes the keys and values of its own heads."""
        (q_TND,) = self._all_tokens([q])
        latent, shared = (self._gather(x) for x in block)
        of_own_heads = weight.chunk(self.group.size())[self.group.rank()]
        kv = linear(latent, of_own_heads, MatmulProducts(self.ops.matmul)).unflatten(1, (q_TND.shape[1], -1))
        k_TND, v_TND = kv.split([attention.key_size, attention.value_size], dim=-1)
        return self._own_tokens(self._core_attention(q_TND, (k_TND, v_TND, shared)))

    def _core_attention(self, q_TND: Tensor, block: Block) -> Tensor:
        bounds = self.params.cu_seqlens, self.params.max_seqlen
        return self.ops.core_attention(q_TND, keys_of(block), block[1], *bounds, self.scale, True)

    def _gather(self, x: Tensor) -> Tensor:
        """Return the values of all tokens; their gradient is summed over the ranks."""
        return gather_from_sequence_parallel_region(x, self.group).index_select(0, self.shard.gathered_rows)

    def _all_tokens(self, by_head: list[Tensor]) -> list[Tensor]:
        """Each [t, heads, size] -> [T, heads / CP, size], all in one exchange."""
        size = self.group.size()
        assert all(x.shape[1] % size == 0 for x in by_head), f"heads of {[x.shape for x in by_head]} over {size} ranks"
        columns = [x.unflatten(1, (size, -1)).flatten(2) for x in by_head]  # [t, CP, columns for one rank]
        leaving = torch.cat(columns, dim=2).transpose(0, 1)
        arrived = self._exchange(leaving).flatten(0, 1).index_select(0, self.shard.gathered_rows)
        parts = arrived.split([x.shape[2] for x in columns], dim=1)
        return [part.unflatten(1, (-1, x.shape[2])) for part, x in zip(parts, by_head, strict=True)]

    def _own_tokens(self, x_TND: Tensor) -> Tensor:
        """[T, heads / CP, size] -> [t, heads, size]."""
        by_rank = x_TND.index_select(0, self.shard.gathered_order).unflatten(0, (self.group.size(), -1))
        return self._exchange(by_rank).transpose(0, 1).flatten(1, 2)

    def _exchange(self, x: Tensor) -> Tensor:
        """[CP, t, ...], one part for each rank -> [CP, t, ...], one part from each."""
        splits = [x.shape[1]] * self.group.size()
        return all_to_all(self.group, x.flatten(0, 1), splits, splits).unflatten(0, x.shape[:2])


def _at_least(x: Tensor, num_heads: int) -> Tensor:
    """Repeat every head, copies side by side, up to ``num_heads`` heads."""
    return x if x.shape[1] % num_heads == 0 else x.repeat_interleave(num_heads // x.shape[1], dim=1)

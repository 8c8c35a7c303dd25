"""Attention with each rank taking all tokens of some heads (``cp_comm_type`` "a2a"; DeepSpeed-Ulysses, 2309.14509)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron.core.context_parallel.block import Block, keys_of
from megatron.core.context_parallel.zigzag import ContextShard
from megatron.core.ops import TrainOps
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region


def attention_by_heads(
    q: torch.Tensor,
    block: Block,
    ops: TrainOps,
    scale: float,
    params: PackedSeqParams,
    shard: ContextShard,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """q [t, N, Dq] and this rank's own block -> [t, N, Dv]; N is a multiple of CP, collective over ``group``.

    Where fewer heads of keys than ranks are shared by the queries, they are repeated before they travel. What all heads
    share of their keys goes to every rank once.
    """
    size = shard.cp_size
    assert q.shape[1] % size == 0, f"{q.shape[1]} heads do not divide over {size} context-parallel ranks"
    by_head = [q, *(_at_least(x, size) for x in block[:2])]
    columns = [x.unflatten(1, (size, -1)).flatten(2) for x in by_head]  # [t, CP, columns for one rank]
    arrived = _to_tokens(torch.cat(columns, dim=2), group).index_select(0, shard.gathered_rows)
    parts = arrived.split([x.shape[2] for x in columns], dim=1)
    q_TND, k_TMD, v_TMD = (part.unflatten(1, (-1, x.shape[2])) for part, x in zip(parts, by_head, strict=True))
    heads: Block = (k_TMD, v_TMD)
    if len(block) == 3:
        shared = gather_from_sequence_parallel_region(block[2], group).index_select(0, shard.gathered_rows)
        heads = (k_TMD, v_TMD, shared)
    out_TND = ops.core_attention(q_TND, keys_of(heads), v_TMD, params.cu_seqlens, params.max_seqlen, scale, True)
    leaving = out_TND.index_select(0, shard.gathered_order).flatten(1).unflatten(0, (size, -1))
    return _to_heads(leaving, group).unflatten(1, (-1, out_TND.shape[2]))


def _at_least(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Neighbouring copies of every head, if there are less than ``num_heads``."""
    return x if x.shape[1] % num_heads == 0 else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def _to_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[t, CP, columns of each rank] -> this rank's columns of all tokens [T, columns], rank by rank."""
    splits = [x.shape[0]] * group.size()
    return all_to_all(group, x.transpose(0, 1).flatten(0, 1), splits, splits)


def _to_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[CP, t, columns]: one part of the tokens for each rank -> this rank's tokens [t, CP * columns]."""
    splits = [x.shape[1]] * group.size()
    return all_to_all(group, x.flatten(0, 1), splits, splits).unflatten(0, x.shape[:2]).transpose(0, 1).flatten(1)

"""The attention between queries, keys and values of a packed micro-batch, whichever ranks share its tokens."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from megatron.core.context_parallel.block import Block, BlockAttention, keys_of
from megatron.core.context_parallel.by_heads import HeadExchange
from megatron.core.context_parallel.gathered import gathered_attention
from megatron.core.context_parallel.ring import ring_attention
from megatron.core.context_parallel.zigzag import ContextShard
from megatron.core.ops import TrainOps
from megatron.core.ops.reference_attention import whole_sequence_attention
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import ProcessGroups

COMM_TYPES = ("p2p", "all_gather", "a2a")


class ContextParallelAttention:
    """Causal attention of this rank's tokens to those of all ranks of ``groups.cp``; what every attention layer calls.

    ``cp_comm_type`` selects what is sent: "p2p" (default) keys and values from rank to rank, beside the computation;
    "all_gather" keys and values to everybody at once; "a2a" queries, keys, values and outputs, so that a rank has all
    tokens of N/CP heads and calls the same kernel as one process. With a CP size of 1 it is ``ops.core_attention``.
    """

    def __init__(self, groups: ProcessGroups, ops: TrainOps, scale: float, cp_comm_type: str | None = None) -> None:
        self.group = groups.cp
        self.ops = ops
        self.scale = scale
        self.cp_comm_type = cp_comm_type or COMM_TYPES[0]
        if self.cp_comm_type not in COMM_TYPES:
            raise ValueError(f"cp_comm_type is {cp_comm_type!r}; use one of {', '.join(COMM_TYPES)}")

    @property
    def keeps_only_inputs(self) -> bool:
        """Whether backward keeps only q, k, v, the output and its statistics, so that recompute would free nothing."""
        return self.group.size() > 1 and self.cp_comm_type != "a2a"

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, params: PackedSeqParams, shared_k: Tensor | None = None
    ) -> Tensor:
        """q [t, N, D], k [t, M, D], v [t, M, Dv] of this rank's tokens -> [t, N, Dv]; M divides N.

        shared_k [t, 1, R]: the last part of every head's key, when all heads share it (k is then [t, M, D-R]); it
        travels once instead of per head. Collective over the context-parallel group, as is the backward.
        """
        block = (k, v) if shared_k is None else (k, v, shared_k)
        if self.group.size() == 1:
            bounds, shared = (params.cu_seqlens, params.max_seqlen), params.shared_prompts
            k = keys_of(block)
            if shared is None:
                return self.ops.core_attention(q, k, v, *bounds, self.scale, True)
            attend = self.ops.shared_prompt_attention or partial(whole_sequence_attention, self.ops.core_attention)
            return attend(q, k, v, *bounds, self.scale, shared)
        assert params.shared_prompts is None, "context-parallel ranks share whole sequences, not their prompts"
        shard = self._shard(q, params)
        if self.cp_comm_type == "a2a":
            return HeadExchange(self.ops, self.scale, params, shard, self.group).attend(q, block)
        return self._attend_blocks(q, block, None, BlockAttention(self.ops, self.scale), shard)

    def attend_to_latents(
        self, q: Tensor, latent: Tensor, shared_k: Tensor, weight: Tensor, params: PackedSeqParams, value_size: int
    ) -> Tensor:
        """q [t, N, D+R], latent [t, C], shared_k [t, 1, R], weight [N * (D+Dv), C] -> [t, N, Dv], for CP > 1.

        Latent attention (MLA) that sends latents instead of the keys and values that each head computes from them. This
        is a fraction of the bytes, but with "p2p" and "all_gather" the rank with the queries computes keys and values
        again (also in backward). ``weight`` holds each head's rows for keys, then for values.
        """
        shard = self._shard(q, params)
        key_size = weight.shape[0] // q.shape[1] - value_size
        attention = BlockAttention(self.ops, self.scale, key_size, value_size)
        if self.cp_comm_type == "a2a":
            exchange = HeadExchange(self.ops, self.scale, params, shard, self.group)
            return exchange.attend_to_latents(q, (latent, shared_k), weight, attention)
        return self._attend_blocks(q, (latent, shared_k), weight, attention, shard)

    def _attend_blocks(
        self, q: Tensor, block: Block, weight: Tensor | None, attention: BlockAttention, shard: ContextShard
    ) -> Tensor:
        attend = ring_attention if self.cp_comm_type == "p2p" else gathered_attention
        return attend(q, block, weight, attention, shard, self.group)

    def _shard(self, q: Tensor, params: PackedSeqParams) -> ContextShard:
        shard = ContextShard.of(params, self.group.size(), self.group.rank(), q.device)
        assert len(q) == int(shard.local[-1]), f"{len(q)} tokens; bounds {params.cu_seqlens} over {shard.cp_size} ranks"
        return shard

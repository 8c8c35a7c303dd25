"""Which tokens of a packed micro-batch a context-parallel rank holds, as index arithmetic.

A sequence of n tokens (n a multiple of 2 CP) is cut into 2 CP chunks; rank r holds chunk r and chunk 2CP-1-r, in this
order, so that under a causal mask every rank has the same work. Packed: sequence by sequence these two chunks.
Letters: B sequences, T tokens of all ranks together, t = T/CP tokens of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import async_h2d


def zigzag_indices(cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Return int64 [t]: the indices, in the packed order of all tokens, of the tokens that ``cp_rank`` holds.

    cu_seqlens: int32 [B+1], bounds of the whole sequences. Raises ``ValueError`` for lengths that cannot be cut.
    """
    bounds = cu_seqlens.long().cpu()
    if cp_size == 1:
        return torch.arange(int(bounds[-1]))
    _check_lengths(bounds.diff(), cp_size)
    chunks = bounds.diff() // (2 * cp_size)
    row = torch.arange(int(bounds[-1]) // cp_size)
    sequence = torch.repeat_interleave(torch.arange(len(chunks)), 2 * chunks, output_size=len(row))
    place, chunk = row - bounds[sequence] // cp_size, chunks[sequence]
    # Row of the second half: chunk 2CP-1-r instead of r+1, which would follow the first one.
    start = torch.where(place < chunk, cp_rank * chunk, (2 * cp_size - 2 - cp_rank) * chunk)
    return bounds[sequence] + start + place


def gathered_rows(cu_seqlens: Tensor, cp_size: int) -> Tensor:
    """Return int64 [T]: for every token of the packed order its row in ``torch.cat`` of all ranks' tokens.

    ``torch.cat(parts)[gathered_rows(...)]`` puts per-token values of the ranks back together.
    """
    return torch.cat([zigzag_indices(cu_seqlens, cp_size, rank) for rank in range(cp_size)]).argsort()


def _check_lengths(lengths: Tensor, cp_size: int) -> None:
    wrong = (lengths % (2 * cp_size)).nonzero().flatten().tolist()
    if wrong:
        shown = ", ".join(f"sequence {i} has {int(lengths[i])} tokens" for i in wrong[:5])
        raise ValueError(
            f"{shown}{', ...' if len(wrong) > 5 else ''}; context_parallel_size {cp_size} needs multiples of "
            f"{2 * cp_size}: pad every sequence to one"
        )


@dataclass(frozen=True)
class ContextShard:
    """One rank's part of a micro-batch: bounds int32 [B+1] on the host, rows int64 on the device of the activations.

    Made once per micro-batch and kept in its ``PackedSeqParams``; layers share the index tensors.
    """

    whole: Tensor  # bounds of all sequences, in all T tokens
    cp_size: int
    cp_rank: int
    device: torch.device

    @staticmethod
    def of(params: PackedSeqParams, cp_size: int, cp_rank: int, device: torch.device) -> ContextShard:
        """The shard of this micro-batch; the first call of a micro-batch makes it."""
        key = (ContextShard, cp_size, cp_rank, device)
        if key not in params.derived:
            whole = params.cu_seqlens.cpu()
            _check_lengths(whole.diff(), cp_size)
            params.derived[key] = ContextShard(whole, cp_size, cp_rank, device)
        shard = params.derived[key]
        assert isinstance(shard, ContextShard)
        return shard

    @cached_property
    def local(self) -> Tensor:
        """Bounds of this rank's two chunks of every sequence."""
        return self.whole // self.cp_size

    @cached_property
    def half(self) -> Tensor:
        """Bounds when only the first, or only the second chunk of every sequence is there."""
        return self.whole // (2 * self.cp_size)

    @cached_property
    def first_rows(self) -> Tensor:
        """This rank's rows [t/2] of the first chunks."""
        return async_h2d(self._is_first.nonzero().flatten(), self.device)

    @cached_property
    def second_rows(self) -> Tensor:
        """This rank's rows [t/2] of the second chunks."""
        return async_h2d((~self._is_first).nonzero().flatten(), self.device)

    @cached_property
    def gathered_rows(self) -> Tensor:
        """Row of every token [T] in the concatenation of all ranks' tokens."""
        return async_h2d(self._gathered_rows, self.device)

    @cached_property
    def gathered_order(self) -> Tensor:
        """The packed order's token [T] of every row in the concatenation of all ranks' tokens."""
        return async_h2d(self._gathered_rows.argsort(), self.device)

    @cached_property
    def keys_of_first(self) -> tuple[Tensor, Tensor]:
        """The keys that every sequence's first chunk sees: rows in the ranks' concatenated tokens, and their bounds."""
        return self._prefixes(self.cp_rank + 1)

    @cached_property
    def keys_of_second(self) -> tuple[Tensor, Tensor]:
        """The same for the second chunk."""
        return self._prefixes(2 * self.cp_size - self.cp_rank)

    def _prefixes(self, num_chunks: int) -> tuple[Tensor, Tensor]:
        """The first ``num_chunks`` chunks of every sequence, packed."""
        bounds = self.half * num_chunks
        lengths = bounds.diff().long()
        shift = torch.repeat_interleave((self.whole - bounds)[:-1].long(), lengths, output_size=int(bounds[-1]))
        return async_h2d(self._gathered_rows[torch.arange(len(shift)) + shift], self.device), bounds

    @cached_property
    def _gathered_rows(self) -> Tensor:
        return gathered_rows(self.whole, self.cp_size)

    @cached_property
    def _is_first(self) -> Tensor:
        chunks = self.half.diff().long()
        sides = torch.tensor([True, False]).repeat(len(chunks))
        return torch.repeat_interleave(sides, chunks.repeat_interleave(2))

"""Padded prompt/response rows to packed micro-batches, and per-token results back to rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.packed_seq_params import PackedSeqParams


@dataclass(frozen=True)
class PackedMicroBatch:
    """One micro-batch of packed sequences (T tokens, S scored response tokens).

    Attributes:
        rows_S: row of every scored token in the batch it was packed from, int64 [S].
        cols_S: its response column, int64 [S].
        positions_S: the packed position whose logits predict it, int64 [S].
        input_ids_T, position_ids_T, labels_T: int64 [T]; a label is the next token of the same sequence.
        packed_seq_params: cumulative lengths, on the host; a last dummy sequence pads T to a multiple of the
            tensor-parallel size.
    """

    rows_S: Tensor
    cols_S: Tensor
    positions_S: Tensor
    input_ids_T: Tensor
    position_ids_T: Tensor
    labels_T: Tensor
    packed_seq_params: PackedSeqParams

    @property
    def num_tokens(self) -> int:
        """Packed tokens T, padding included."""
        return int(self.input_ids_T.numel())


def pack_micro_batch(
    input_ids_BL: Tensor, attention_mask_BL: Tensor, response_mask_BR: Tensor, rows: Sequence[int], multiple: int
) -> PackedMicroBatch:
    """Packs the ``rows`` of a padded batch; T is rounded up to ``multiple`` with a dummy sequence of zeros.

    Rows are prompts left-padded and responses right-padded to L = P + R. An empty ``rows`` gives a micro-batch of the
    dummy sequence alone: a data-parallel rank that has no rows left still takes part in every expert exchange.
    """
    device = input_ids_BL.device
    chosen = torch.as_tensor(list(rows), dtype=torch.long, device=device)
    mask_bL = attention_mask_BL[chosen].bool()
    lengths_b = mask_bL.sum(-1)
    num_real = int(lengths_b.sum())
    num_pad = -num_real % multiple if num_real else multiple
    input_ids_T = torch.cat([input_ids_BL[chosen][mask_bL], input_ids_BL.new_zeros(num_pad)])
    position_bL = mask_bL.long().cumsum(-1) - 1
    position_ids_T = torch.cat([position_bL[mask_bL], torch.arange(num_pad, device=device)])

    # The packed index of every real token, so that a response token finds the position before it.
    index_bL = (mask_bL.flatten().long().cumsum(0) - 1).view_as(mask_bL)
    num_cols = response_mask_BR.size(1)
    scored_bR = response_mask_BR[chosen].bool()
    rows_b, cols_S = scored_bR.nonzero(as_tuple=True)
    positions_S = index_bL[:, -num_cols:][scored_bR] - 1

    labels_T = torch.cat([input_ids_T[1:], input_ids_T.new_zeros(1)])
    lengths = [*lengths_b.tolist(), *([num_pad] if num_pad else [])]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    params = PackedSeqParams(cu_seqlens=cu_seqlens, max_seqlen=max(lengths))
    return PackedMicroBatch(
        rows_S=chosen[rows_b],
        cols_S=cols_S,
        positions_S=positions_S,
        input_ids_T=input_ids_T,
        position_ids_T=position_ids_T,
        labels_T=labels_T,
        packed_seq_params=params,
    )


def scatter_to_rows(values_S: Sequence[Tensor], micro_batches: Sequence[PackedMicroBatch], shape: torch.Size) -> Tensor:
    """Per-token values of several micro-batches to one [B, R] fp32 tensor, zero where nothing was scored."""
    device = micro_batches[0].rows_S.device
    rows_BR = torch.zeros(shape, dtype=torch.float32, device=device)
    for values, micro in zip(values_S, micro_batches, strict=True):
        rows_BR[micro.rows_S, micro.cols_S] = values.float()
    return rows_BR

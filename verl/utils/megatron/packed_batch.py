"""Padded prompt/response rows to packed micro-batches, and per-token results back to rows.

Letters: B rows of the padded batch; b the sequences of the chosen ones, more than one of a row where a sample of
several turns has begun anew; L columns of a row, P of its prompt, R of its response; n real tokens of the sequences, s
their scored tokens; F tokens of the whole sequences with padding and dummy, q these with the dummy, r tokens of a
prompt that another sequence computes. What is left on this context-parallel rank: T of F, N of n, S of s;
W are its tokens where each sequence has a copy of a prompt that others share, else T.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.context_parallel import zigzag_indices
from megatron.core.packed_seq_params import PackedSeqParams, SharedPrompts
from megatron.core.transformer.moe.router_replay import MicroBatchRouting
from megatron.core.utils import async_h2d
from verl.utils.partitions import RowTokens


@dataclass(frozen=True)
class PackedMicroBatch:
    """One micro-batch of packed sequences: T tokens of this context-parallel rank, S response tokens scored here.

    It is packed on the host, and ``to`` moves what the model and the loss read to their device; what finds tokens in
    the padded batch stays on the host, where that batch is.

    Attributes:
        rows_S: row of every scored token in the batch it was packed from, int64 [S] on the host.
        cols_S: its response column, int64 [S] on the host.
        token_rows_N, token_cols_N, token_positions_N: row, column of the padded batch (prompt included) and packed
            position of every real token here, int64 [N] on the host.
        token_is_kept_N: those that an earlier sequence of the same row has too, bool [N] on the host.
        places_2S: ``rows_S`` and ``cols_S`` where the loss is computed, int64 [2, S].
        members_M: the rows that were packed, the same on all context-parallel ranks, int64 [M].
        positions_S: the packed position whose logits predict a scored token, int64 [S].
        whole_positions_S: that position where each sequence has its own copy of a prompt that others share, int64 [S].
        labels_S: the scored tokens, int64 [S].
        input_ids_T, position_ids_T: int64 [T].
        packed_seq_params: cumulative lengths of the whole sequences, on the host; the last one may be a dummy.
    """

    rows_S: Tensor
    cols_S: Tensor
    token_rows_N: Tensor
    token_cols_N: Tensor
    token_positions_N: Tensor
    token_is_kept_N: Tensor
    places_2S: Tensor
    members_M: Tensor
    positions_S: Tensor
    whole_positions_S: Tensor
    labels_S: Tensor
    input_ids_T: Tensor
    position_ids_T: Tensor
    packed_seq_params: PackedSeqParams

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids_T.numel())

    @property
    def loss_mask_W(self) -> Tensor:
        """1 where the prediction of the next token is scored, fp32 [W]."""
        shared = self.packed_seq_params.shared_prompts
        num_tokens = self.num_tokens if shared is None else len(shared.computed_F)
        mask_W = torch.zeros(num_tokens, device=self.input_ids_T.device)
        return mask_W.index_fill_(0, self.whole_positions_S, 1.0)

    def to(self, device: torch.device) -> PackedMicroBatch:
        """The micro-batch for a model on ``device``: copies from pinned memory, for which the host does not wait."""
        if device.type == "cpu":
            return self
        params = self.packed_seq_params
        is_padding_T = () if params.is_padding_T is None else (params.is_padding_T.long(),)
        tokens = (self.input_ids_T, self.position_ids_T, *is_padding_T)
        scored = (self.positions_S, self.whole_positions_S, self.labels_S)
        parts = (self.places_2S.flatten(), self.members_M, *scored, *tokens)
        moved = async_h2d(torch.cat(parts), device).split([len(part) for part in parts])
        places, members_M, positions_S, whole_positions_S, labels_S, ids_T, position_ids_T, *padding = moved
        shared = params.shared_prompts
        return replace(
            self,
            places_2S=places.view(2, -1),
            members_M=members_M,
            positions_S=positions_S,
            whole_positions_S=whole_positions_S,
            labels_S=labels_S,
            input_ids_T=ids_T,
            position_ids_T=position_ids_T,
            packed_seq_params=replace(
                params,
                is_padding_T=padding[0].bool() if padding else None,
                shared_prompts=None if shared is None else shared.to(device),
            ),
        )

    def with_routing(self, routing: MicroBatchRouting | None) -> PackedMicroBatch:
        """The same tokens, whose experts ``routing`` traces or replays; None: the gate chooses."""
        return replace(self, packed_seq_params=replace(self.packed_seq_params, routing=routing))


def padded_lengths(lengths: Tensor, cp_size: int) -> Tensor:
    """Tokens that sequences take when they are packed: with context parallelism a multiple of its 2 CP chunks."""
    multiple = 2 * cp_size if cp_size > 1 else 1
    return (lengths + multiple - 1) // multiple * multiple


def row_tokens(
    input_ids_BL: Tensor,
    attention_mask_BL: Tensor,
    response_mask_BR: Tensor,
    cp_size: int,
    *,
    shares_prompts: bool,
    row_starts_BR: Tensor | None = None,
) -> RowTokens:
    """The tokens that ``pack_micro_batch`` gives the rows of a padded batch."""
    num_prompt_cols = attention_mask_BL.size(1) - response_mask_BR.size(1)
    mask_BP = attention_mask_BL[:, :num_prompt_cols].bool()
    first_B = _first_with_prompt(input_ids_BL[:, :num_prompt_cols], mask_BP, shares_prompts)
    prompts_B = mask_BP.sum(-1) * shares_prompts
    rows_b, mask_bL, _ = _sequences(attention_mask_BL.bool(), row_starts_BR)
    has_prompt_b = (mask_bL[:, :num_prompt_cols] == mask_BP[rows_b]).all(-1)
    own_b = padded_lengths(mask_bL.sum(-1), cp_size) - prompts_B[rows_b] * has_prompt_b
    own_B = torch.zeros_like(prompts_B).index_add(0, rows_b, own_b)
    return RowTokens(own_B.tolist(), prompts_B.tolist(), first_B.tolist())


def _sequences(mask_BL: Tensor, row_starts_BR: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The row of each sequence, int64 [b], the columns of its tokens, bool [b, L], and those that it alone has.

    Where a new row of a sample begins, ``row_starts_BR`` has 1 + the tokens of the one before that it begins with.
    """
    if row_starts_BR is None or not row_starts_BR.any():
        return torch.arange(len(mask_BL)), mask_BL, mask_BL
    num_cols = mask_BL.size(1)
    columns_L = torch.arange(num_cols)
    rows, masks, owns = list[int](), list[Tensor](), list[Tensor]()
    for row, (mask_L, given_R) in enumerate(zip(mask_BL, row_starts_BR, strict=True)):
        starts = given_R.nonzero().flatten()
        begins = [0, *(starts + num_cols - len(given_R)).tolist()]
        kept = [0, *(given_R[starts] - 1).tolist()]
        before_L = torch.zeros_like(mask_L)
        for begin, end, num_kept in zip(begins, [*begins[1:], num_cols], kept, strict=True):
            own_L = mask_L & (columns_L >= begin) & (columns_L < end)
            before_L = before_L & (before_L.cumsum(0) <= num_kept) | own_L
            rows.append(row)
            masks.append(before_L)
            owns.append(own_L)
    return torch.tensor(rows), torch.stack(masks), torch.stack(owns)


def pack_micro_batch(
    input_ids_BL: Tensor,
    attention_mask_BL: Tensor,
    response_mask_BR: Tensor,
    rows: Sequence[int],
    multiple: int,
    cp_size: int = 1,
    cp_rank: int = 0,
    shares_prompts: bool = False,
    row_starts_BR: Tensor | None = None,
) -> PackedMicroBatch:
    """Packs the ``rows`` of a padded batch and takes the part of context-parallel rank ``cp_rank``, on the host.

    Rows are prompts left-padded and responses right-padded to L = P + R. Each is filled up with zeros to
    ``padded_lengths``; a dummy sequence of zeros makes this rank's T a multiple of ``multiple`` (the tensor-parallel
    size). An empty ``rows`` gives the dummy sequence alone: a data-parallel rank that has no rows left still takes part
    in every expert exchange. With ``shares_prompts`` rows with the same prompt have its tokens once (SharedPrompts).
    Where ``row_starts_BR`` is not 0, a row goes on in a sequence of its own, which begins with so many less 1 of the
    tokens of the one before; each token is scored once.
    """
    members = torch.as_tensor(list(rows), dtype=torch.long)
    starts_of_members = None if row_starts_BR is None else row_starts_BR[members]
    rows_b, mask_bL, own_bL = _sequences(attention_mask_BL[members].bool(), starts_of_members)
    chosen = members[rows_b]
    lengths_b = padded_lengths(mask_bL.sum(-1), cp_size)
    lengths, num_cols = lengths_b.tolist(), response_mask_BR.size(1)
    assert cp_size == 1 or not shares_prompts, "context-parallel ranks share whole sequences, not their prompts"
    mask_bP = mask_bL[:, :-num_cols]
    first_b = _first_with_prompt(input_ids_BL[chosen, :-num_cols], mask_bP, shares_prompts)
    repeats_b = first_b < torch.arange(len(chosen))
    num_repeated = int(mask_bP[repeats_b].sum())
    num_used, step = sum(lengths), math.lcm(2 * cp_size if cp_size > 1 else 1, cp_size * multiple)
    num_dummy = -(num_used - num_repeated) % step if num_used else step
    lengths += [num_dummy] if num_dummy else []
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)

    # The packed index of every real token; a response token is predicted at the one before its own.
    rows_n, cols_n = mask_bL.nonzero(as_tuple=True)
    starts_b = lengths_b.cumsum(0) - lengths_b
    index_bL = starts_b[:, None] + mask_bL.long().cumsum(-1) - 1
    positions_n = index_bL[rows_n, cols_n]
    rows_s, cols_s = (response_mask_BR[chosen].bool() & own_bL[:, -num_cols:]).nonzero(as_tuple=True)
    positions_s = index_bL[:, -num_cols:][rows_s, cols_s] - 1

    ids_F = input_ids_BL.new_zeros(num_used + num_dummy)
    ids_F[positions_n] = input_ids_BL[chosen[rows_n], cols_n]
    is_padding_F = torch.ones_like(ids_F, dtype=torch.bool).index_fill_(0, positions_n, False)
    steps_F = torch.arange(ids_F.numel())
    lengths_q = torch.tensor(lengths)
    position_ids_F = steps_F - torch.repeat_interleave(lengths_q.cumsum(0) - lengths_q, lengths_q)

    computed_F = steps_F.clone()
    is_repeated_n = repeats_b[rows_n] & (cols_n < mask_bP.size(1))
    rows_r, positions_r = rows_n[is_repeated_n], positions_n[is_repeated_n]
    computed_F[positions_r] = positions_r - starts_b[rows_r] + starts_b[first_b[rows_r]]
    order_T = (computed_F == steps_F).nonzero()[:, 0] if num_repeated else zigzag_indices(cu_seqlens, cp_size, cp_rank)
    local_F = torch.full_like(steps_F, -1)
    local_F[order_T] = torch.arange(order_T.numel())
    local_F = local_F[computed_F]  # a token that others repeat is where the first of them is
    is_padding_T = is_padding_F[order_T] if is_padding_F.any() else None
    is_here_s, is_here_n = local_F[positions_s] >= 0, local_F[positions_n] >= 0
    shared = _shared_prompts(local_F, order_T, lengths_q, first_b, mask_bP.sum(-1)) if num_repeated else None
    places_2S = torch.stack((chosen[rows_s[is_here_s]], cols_s[is_here_s]))
    positions_S = local_F[positions_s[is_here_s]]
    return PackedMicroBatch(
        rows_S=places_2S[0],
        cols_S=places_2S[1],
        token_rows_N=chosen[rows_n[is_here_n]],
        token_cols_N=cols_n[is_here_n],
        token_positions_N=local_F[positions_n[is_here_n]],
        token_is_kept_N=~own_bL[rows_n, cols_n][is_here_n],
        places_2S=places_2S,
        members_M=members,
        positions_S=positions_S,
        whole_positions_S=positions_S if shared is None else positions_s,
        labels_S=ids_F[positions_s[is_here_s] + 1],
        input_ids_T=ids_F[order_T],
        position_ids_T=position_ids_F[order_T],
        packed_seq_params=PackedSeqParams(cu_seqlens, max(lengths), is_padding_T, shared_prompts=shared),
    )


def _shared_prompts(
    local_F: Tensor, order_T: Tensor, lengths_q: Tensor, first_b: Tensor, prompt_lengths_b: Tensor
) -> SharedPrompts:
    """local_F: where each token of the whole sequences is computed; order_T: which of them each computed one is.

    lengths_q: of the whole sequences, with the dummy; first_b: the first with each one's prompt.
    """
    starts_q = lengths_q.cumsum(0) - lengths_q
    num_dummy = len(lengths_q) - len(first_b)
    prompts_q = F.pad(prompt_lengths_b, (0, num_dummy))
    firsts_q = torch.cat((first_b, torch.arange(len(first_b), len(lengths_q))))
    prompt_starts_q = local_F[starts_q[firsts_q]]
    own_starts_q = local_F[(starts_q + prompts_q).clamp(max=len(local_F) - 1)]  # past the end where nothing is its own
    ends_q = own_starts_q + lengths_q - prompts_q
    spans_q4 = torch.stack((prompt_starts_q, prompt_starts_q + prompts_q, own_starts_q, ends_q), 1)
    copies_T = torch.bincount(local_F, minlength=order_T.numel()).float()
    return SharedPrompts(spans_q4[firsts_q.argsort(stable=True)], local_F, order_T, copies_T)


def _first_with_prompt(prompts_bP: Tensor, mask_bP: Tensor, shares_prompts: bool) -> Tensor:
    """The first row that has the prompt of each row, int64 [b]; rows without a prompt share nothing."""
    if not shares_prompts:
        return torch.arange(len(prompts_bP))
    firsts: dict[bytes, int] = {}
    keys = (prompts_bP.masked_fill(~mask_bP, -1)).numpy()
    has_prompt = mask_bP.any(-1).tolist()
    found = [firsts.setdefault(key.tobytes(), row) if has_prompt[row] else row for row, key in enumerate(keys)]
    return torch.tensor(found, dtype=torch.long)


def scatter_to_rows(values_S: Sequence[Tensor], micro_batches: Sequence[PackedMicroBatch], shape: torch.Size) -> Tensor:
    """Per-token values of several micro-batches to fp32 [B, R] on the host, zero where nothing was scored."""
    rows_BR = torch.zeros(shape, dtype=torch.float32)
    on_host = torch.cat([values.float() for values in values_S]).cpu()
    for values, micro in zip(on_host.split([len(values) for values in values_S]), micro_batches, strict=True):
        rows_BR[micro.rows_S, micro.cols_S] = values
    return rows_BR

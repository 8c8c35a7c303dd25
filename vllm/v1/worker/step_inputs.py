"""The inputs of a scheduled step as host arrays: tokens, positions and cache slots. No torch.

Letters: T tokens of a step, B sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm.v1.worker.input_batch import InputBatch


@dataclass(frozen=True)
class StepInputs:
    """T tokens of B sequences, reordered: the sequences with one new token come first."""

    token_ids_T: np.ndarray  # int64
    positions_T: np.ndarray  # int64
    slots_T: np.ndarray  # int64, the slot of each token in the KV cache
    rows_B: np.ndarray  # int64, the sequences' rows of the batch
    query_lens_B: np.ndarray  # int64, new tokens
    seq_lens_B: np.ndarray  # int64, tokens in the cache, the new ones included
    num_decode: int  # sequences with one new token
    sampled_T: np.ndarray | None  # int64, tokens to sample after, in the step's order; None = all T, in order
    sampled_rows: np.ndarray  # int64, batch rows they belong to


def prepare_step(batch: InputBatch, rows: np.ndarray, num_new: np.ndarray) -> StepInputs:
    """Return the step in which `rows` [B] compute their next `num_new` [B] tokens, and count these as computed."""
    computed = batch.num_computed[rows]
    seq_lens = computed + num_new
    is_sampled = seq_lens == batch.num_tokens[rows]
    batch.num_computed[rows] = seq_lens
    if len(rows) == 0 or int(num_new.max()) == 1:  # a decode step, the common one: one token per row, in order
        are_all_sampled = bool(is_sampled.all())
        return StepInputs(
            token_ids_T=batch.token_ids[rows, computed],
            positions_T=computed,
            slots_T=_slots(batch, rows, computed),
            rows_B=rows,
            query_lens_B=num_new,
            seq_lens_B=seq_lens,
            num_decode=len(rows),
            sampled_T=None if are_all_sampled else np.flatnonzero(is_sampled),
            sampled_rows=rows if are_all_sampled else rows[is_sampled],
        )
    order = np.concatenate((np.flatnonzero(num_new == 1), np.flatnonzero(num_new > 1)))
    ordered_new, starts = num_new[order], np.cumsum(num_new[order]) - num_new[order]
    token_rows = np.repeat(rows[order], ordered_new)
    positions = np.arange(len(token_rows)) + np.repeat(computed[order] - starts, ordered_new)
    last_token = np.empty_like(starts)
    last_token[order] = starts + ordered_new - 1
    return StepInputs(
        token_ids_T=batch.token_ids[token_rows, positions],
        positions_T=positions,
        slots_T=_slots(batch, token_rows, positions),
        rows_B=rows[order],
        query_lens_B=ordered_new,
        seq_lens_B=seq_lens[order],
        num_decode=int((num_new == 1).sum()),
        sampled_T=last_token[is_sampled],
        sampled_rows=rows[is_sampled],
    )


def _slots(batch: InputBatch, rows_T: np.ndarray, positions_T: np.ndarray) -> np.ndarray:
    """Return the slot of each token in the KV cache, int64 [T]."""
    blocks_T, offsets_T = np.divmod(positions_T, batch.block_size)
    slots_T: np.ndarray = batch.block_table[rows_T, blocks_T].astype(np.int64) * batch.block_size + offsets_T
    return slots_T

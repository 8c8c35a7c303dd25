"""A scheduled step in host arrays: which tokens at which positions go where in the cache. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm.v1.worker.input_batch import InputBatch


@dataclass(frozen=True)
class StepPlan:
    """T tokens of B sequences, reordered: the sequences with one new token first."""

    token_ids_T: np.ndarray  # int64
    positions_T: np.ndarray  # int64
    slots_T: np.ndarray  # int64, where each token's latent goes in the KV cache
    rows_B: np.ndarray  # int64, the sequences' rows of the batch
    query_lens_B: np.ndarray  # int64, new tokens
    seq_lens_B: np.ndarray  # int64, tokens in the cache, the new ones included
    num_decode: int  # sequences with one new token
    sampled_T: np.ndarray | None  # int64, tokens to sample after, in the step's order; None = all T, in order
    sampled_rows: np.ndarray  # int64, batch rows they belong to


def plan_step(batch: InputBatch, rows: np.ndarray, num_new: np.ndarray) -> StepPlan:
    """The step in which the batch's `rows` [B] compute their next `num_new` [B] tokens, counted there as computed."""
    computed = batch.num_computed[rows]
    seq_lens = computed + num_new
    is_sampled = seq_lens == batch.num_tokens[rows]
    sampled_T: np.ndarray | None
    if len(rows) == 0 or int(num_new.max()) == 1:  # a decode step, the common one: one token per row, in order
        order, num_decode = np.arange(len(rows)), len(rows)
        token_rows, positions = rows, computed
        sampled_T = None if is_sampled.all() else np.flatnonzero(is_sampled)
    else:
        order = np.concatenate((np.flatnonzero(num_new == 1), np.flatnonzero(num_new > 1)))
        num_decode = int((num_new == 1).sum())
        ordered_new, starts = num_new[order], np.cumsum(num_new[order]) - num_new[order]
        token_rows = np.repeat(rows[order], ordered_new)
        positions = np.arange(len(token_rows)) + np.repeat(computed[order] - starts, ordered_new)
        last_token = np.empty_like(starts)
        last_token[order] = starts + ordered_new - 1
        sampled_T = last_token[is_sampled]
    batch.num_computed[rows] = seq_lens
    block_size = batch.block_size
    slots = batch.block_table[token_rows, positions // block_size].astype(np.int64) * block_size
    return StepPlan(
        token_ids_T=batch.token_ids[token_rows, positions],
        positions_T=positions,
        slots_T=slots + positions % block_size,
        rows_B=rows[order],
        query_lens_B=num_new[order],
        seq_lens_B=seq_lens[order],
        num_decode=num_decode,
        sampled_T=sampled_T,
        sampled_rows=rows[is_sampled],
    )

"""The running requests as rows of host arrays, and a step of them: a few vector operations prepare it. No torch.

Letters: T tokens of a step, B sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request
from vllm.v1.sample.logit_edits import RowEdits

NOWHERE = 2**62


class InputBatch:
    """One row per running request, from admission until it finishes or is preempted."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int64)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int64)
        self.block_table = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        # The first position from which the prediction layer's cache has all entries, or NOWHERE.
        self.predicted_from = np.zeros(max_num_seqs, dtype=np.int64)
        self.has_gaps = False  # blocks that later requests may share lack such entries
        self.temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)  # 0 = no limit
        self.top_p = np.ones(max_num_seqs, dtype=np.float32)
        self.seed = np.zeros(max_num_seqs, dtype=np.uint64)
        self.num_top_logprobs = np.zeros(max_num_seqs, dtype=np.int64)
        self.min_p: dict[int, float] = {}  # by row, where set
        self.edits: dict[int, RowEdits] = {}  # by row, where logits are changed or banned
        self.prompts_to_score: dict[int, Request] = {}  # by row, where log-probs of the prompt are missing
        self.row_of: dict[str, int] = {}
        self.num_added = 0  # rows added so far: while it is the same, so are the settings of the rows
        self._last_requests: list[Request] = []  # the last step's
        self._last_rows = np.empty(0, dtype=np.int64)
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def update(self, step: SchedulerOutput) -> np.ndarray:
        """Update the rows for a scheduled step; return the rows of its requests, int64."""
        if step.requests == self._last_requests and not step.removed:  # in nearly every step of a decoding batch
            for index, new_blocks in enumerate(step.new_block_ids):
                if new_blocks:
                    self._append_blocks(int(self._last_rows[index]), new_blocks)
            return self._last_rows
        for request in step.removed:
            self._remove(request)
        row_of = self.row_of
        rows: list[int] = []
        for request, new_blocks in zip(step.requests, step.new_block_ids, strict=True):
            if new_blocks is None:
                self._add(request)
            elif new_blocks:
                self._append_blocks(row_of[request.request_id], new_blocks)
            rows.append(row_of[request.request_id])
        self._last_requests, self._last_rows = step.requests, np.array(rows, dtype=np.int64)
        return self._last_rows

    def write_drafts(self, step: SchedulerOutput) -> np.ndarray | None:
        """Write the drafts of a step behind the tokens of its requests; return how many each has, int64 [B]."""
        if not step.drafts:
            return None
        counts = np.zeros(len(step.requests), dtype=np.int64)
        for index, request in enumerate(step.requests):
            if draft := step.drafts.get(request.request_id):
                row, counts[index] = self.row_of[request.request_id], len(draft)
                self.token_ids[row, self.num_tokens[row] : self.num_tokens[row] + len(draft)] = draft
        return counts

    def append_tokens(self, rows: np.ndarray, token_ids: np.ndarray, counts: np.ndarray | None = None) -> None:
        """Append a token to each of `rows`, or `counts` [B] of them: all but the last of a row's are right drafts,
        which are computed.
        """
        if counts is None:
            self.token_ids[rows, np.minimum(self.num_tokens[rows], self.token_ids.shape[1] - 1)] = token_ids
            self.num_tokens[rows] += 1
        else:
            at = np.arange(len(token_ids)) + np.repeat(self.num_tokens[rows] - (np.cumsum(counts) - counts), counts)
            self.num_tokens[rows] += counts
            self.num_computed[rows] += counts - 1
            rows = np.repeat(rows, counts)
            self.token_ids[rows, np.minimum(at, self.token_ids.shape[1] - 1)] = token_ids
        if self.edits:
            for row, token in zip(rows.tolist(), token_ids.tolist(), strict=True):
                if row in self.edits:
                    self.edits[row].append(token)

    def _add(self, request: Request) -> None:
        row = self._free_rows.pop()
        self.num_added += 1
        self.row_of[request.request_id] = row
        self.token_ids[row, : len(request.token_ids)] = request.token_ids
        self.num_tokens[row] = len(request.token_ids)
        self.num_computed[row] = request.num_computed_tokens
        self.num_prompt[row] = request.num_prompt_tokens
        self.num_blocks[row] = 0
        self.predicted_from[row] = NOWHERE if request.num_computed_tokens and self.has_gaps else 0
        self._append_blocks(row, request.block_ids)
        self.temperature[row] = request.temperature
        self.top_k[row] = max(request.top_k, 0)
        self.top_p[row] = request.top_p
        self.seed[row] = request.seed
        self.num_top_logprobs[row] = request.num_top_logprobs
        if request.extras is not None and request.extras.min_p > 0:
            self.min_p[row] = request.extras.min_p
        if RowEdits.wanted_by(request):
            self.edits[row] = RowEdits(request)
        if request.needs_prompt_logprobs:
            self.prompts_to_score[row] = request

    def tables(self, inputs: StepInputs, sequences: slice, width: int | None = None) -> np.ndarray:
        """int32 [B, W], the first `width` blocks (all of them without) that these sequences of a step attend to."""
        rows, first_blocks_B = inputs.rows_B[sequences], inputs.first_blocks_B
        if first_blocks_B is None:
            return self.block_table[rows, :width]
        last = self.block_table.shape[1] - 1
        columns = first_blocks_B[sequences, None] + np.arange(last + 1 if width is None else width)
        return self.block_table[rows[:, None], np.minimum(columns, last)]

    def _append_blocks(self, row: int, blocks: list[int]) -> None:
        start = self.num_blocks[row]
        self.block_table[row, start : start + len(blocks)] = blocks
        self.num_blocks[row] = start + len(blocks)

    def _remove(self, request: Request) -> None:
        row = self.row_of.pop(request.request_id, None)
        if row is not None:  # None: the request was dropped before it ran
            for special in (self.min_p, self.edits, self.prompts_to_score):
                special.pop(row, None)
            self._free_rows.append(row)


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
    sampled_lens: np.ndarray  # int64, tokens of their sequences up to them
    # int64, blocks at the beginning of each sequence that it does not attend to: `seq_lens_B` are without them.
    first_blocks_B: np.ndarray | None = None


def prepare_step(
    batch: InputBatch, rows: np.ndarray, num_new: np.ndarray, num_drafts: np.ndarray | None = None
) -> StepInputs:
    """Return the step in which `rows` [B] compute their next `num_new` [B] tokens, and count these as computed, but for
    the last `num_drafts` [B] of them: each draft is a sequence of its own, one token longer than the one before it, so
    that it is computed as in a decode step.
    """
    computed = batch.num_computed[rows]
    if num_drafts is not None:
        num_new = num_new - num_drafts
        batch.num_computed[rows] = computed + num_new
        first = np.cumsum(num_drafts) - num_drafts + np.arange(len(rows))
        rows, computed, num_new = (np.repeat(column, 1 + num_drafts) for column in (rows, computed, num_new))
        computed = computed + np.arange(len(rows)) - np.repeat(first, 1 + num_drafts)
    seq_lens = computed + num_new
    is_sampled = seq_lens >= batch.num_tokens[rows]
    if num_drafts is None:
        batch.num_computed[rows] = seq_lens
    if len(rows) == 0 or int(num_new.max()) == 1:  # a decode step, the common one: one token per row, in order
        are_all_sampled = bool(is_sampled.all())
        return StepInputs(
            token_ids_T=batch.token_ids[rows, computed],
            positions_T=computed,
            slots_T=slots(batch, rows, computed),
            rows_B=rows,
            query_lens_B=num_new,
            seq_lens_B=seq_lens,
            num_decode=len(rows),
            sampled_T=None if are_all_sampled else np.flatnonzero(is_sampled),
            sampled_rows=rows if are_all_sampled else rows[is_sampled],
            sampled_lens=seq_lens if are_all_sampled else seq_lens[is_sampled],
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
        slots_T=slots(batch, token_rows, positions),
        rows_B=rows[order],
        query_lens_B=ordered_new,
        seq_lens_B=seq_lens[order],
        num_decode=int((num_new == 1).sum()),
        sampled_T=last_token[is_sampled],
        sampled_rows=rows[is_sampled],
        sampled_lens=seq_lens[is_sampled],
    )


def slots(batch: InputBatch, rows_T: np.ndarray, positions_T: np.ndarray) -> np.ndarray:
    """Return the slot of each token in the KV cache, int64 [T]."""
    blocks_T, offsets_T = np.divmod(positions_T, batch.block_size)
    slots_T: np.ndarray = batch.block_table[rows_T, blocks_T].astype(np.int64) * batch.block_size + offsets_T
    return slots_T

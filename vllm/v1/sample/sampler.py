"""Samples the tokens of a batch, and computes the log-probs of prompts' own tokens, chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, int64

from vllm.ops.contract import RolloutOps, SampledTokens, SamplingBatch
from vllm.utils import async_tensor_h2d
from vllm.v1.request import Request, TopLogprobs
from vllm.v1.sample.logit_edits import gather_bans, gather_edits
from vllm.v1.sample.rng import position_keys, splitmix64, vocab_keys
from vllm.v1.worker.input_batch import InputBatch, StepInputs

STEPS_OF_KEYS = 32  # made at a time


@dataclass
class SamplerOutput:
    """One step's samples on the host, B rows."""

    token_ids: np.ndarray  # int64 [B]
    logprobs: list[float]
    # Per row: rank of the sampled token, most likely ids, their log-probs.
    top: list[TopLogprobs] | None
    unscored: list[Request] = field(default_factory=list)  # logits of their prompts are NaN or infinite
    drafts: dict[str, list[int]] = field(default_factory=dict)  # the prediction layer's, by request

    @property
    def is_whole(self) -> bool:
        """Whether every row has a token, as nearly always."""
        return math.isfinite(sum(self.logprobs)) and not self.unscored

    def are_finite(self) -> list[bool]:
        """Whether each row could be drawn from."""
        return [math.isfinite(logprob) for logprob in self.logprobs]


class _RowSettings:
    """Cached settings of a batch, valid as long as its rows stay the same; each row then gets a token in every step."""

    def __init__(self, batch: InputBatch, rows_B: np.ndarray, settings: SamplingBatch, has_drafts: bool) -> None:
        self.num_added, self.rows_B, self.settings = batch.num_added, rows_B, settings
        self.has_drafts = has_drafts  # then rows get tokens of several positions, or of others than the next
        self._mixed_seeds_B = splitmix64(batch.seed[rows_B])
        self._next_B = batch.num_tokens[rows_B] - batch.num_prompt[rows_B]  # positions whose keys are not made yet
        self._keys: list[Tensor] = []  # of the positions before that, the last one first

    def next_keys(self, send: Callable[[np.ndarray], Tensor]) -> Tensor:
        """Return int32 [B, 2], the keys of every row's next position; computed for several positions at once."""
        if not self._keys:
            positions_SB = self._next_B + np.arange(STEPS_OF_KEYS)[::-1, None]
            keys = position_keys(self._mixed_seeds_B, positions_SB)
            self._keys = list(send(keys).view(STEPS_OF_KEYS, -1, 2).unbind())
            self._next_B = self._next_B + STEPS_OF_KEYS
        return self._keys.pop()

    def keys_at(self, positions_B: np.ndarray) -> np.ndarray:
        """Return int32 [B, 2], the keys of these positions."""
        return position_keys(self._mixed_seeds_B, positions_B)


class Sampler:
    """Samples rows of one InputBatch from their logits."""

    def __init__(self, vocab_size: int, ops: RolloutOps, device: torch.device, logprobs_mode: str) -> None:
        self.vocab_size, self.ops, self.device = vocab_size, ops, device
        self.logprobs_mode = logprobs_mode  # one of vllm.config.LOGPROBS_MODES
        self.vocab_keys_W = torch.from_numpy(vocab_keys(vocab_size)).to(device)
        self._last: _RowSettings | None = None

    def __call__(
        self, logits_BW: Tensor, batch: InputBatch, rows: np.ndarray, lens: np.ndarray | None = None
    ) -> SamplerOutput:
        """logits fp32 [B, W] of the batch's `rows` [B]; the next token of each, or the one after its first `lens` [B]
        tokens, which the batch has.
        """
        sampled = self.ops.sample(logits_BW, self._settings(batch, rows, lens))
        return SamplerOutput(sampled.token_ids_B.cpu().numpy(), sampled.logprobs_B.tolist(), _top(sampled))

    def _settings(self, batch: InputBatch, rows: np.ndarray, lens: np.ndarray | None) -> SamplingBatch:
        last = self._last
        are_the_same = last is not None and (last.rows_B is rows or np.array_equal(last.rows_B, rows))
        if (
            last is None
            or not are_the_same
            or last.num_added != batch.num_added
            or last.has_drafts != (lens is not None)
        ):
            last = self._last = self._settings_of(batch, rows, lens is not None)
        settings = last.settings
        if lens is None:
            settings.keys_B2 = last.next_keys(self._send)
        else:
            settings.keys_B2 = self._send(last.keys_at(lens - batch.num_prompt[rows]))
        if batch.edits:
            settings = replace(settings)
            self._add_edits(settings, batch, rows, lens)
        return settings

    def _settings_of(self, batch: InputBatch, rows: np.ndarray, has_drafts: bool) -> _RowSettings:
        temperature, top_k, top_p = batch.temperature[rows], batch.top_k[rows], batch.top_p[rows]
        limited_k = np.where((top_k > 0) & (top_k < self.vocab_size), top_k, self.vocab_size)
        has_top_k, has_top_p = bool((limited_k < self.vocab_size).any()), bool((top_p < 1).any())
        settings = SamplingBatch(
            temperature_B=self._send(temperature),
            keys_B2=torch.empty(0),  # those of a step
            vocab_keys_W=self.vocab_keys_W,
            top_k_B=self._send(limited_k.astype(np.int32)) if has_top_k else None,
            max_top_k=int(limited_k.max()) if has_top_k else 0,
            top_p_B=self._send(top_p) if has_top_p else None,
            banned_BW=None,
            has_greedy=bool((temperature == 0).any()),
            has_random=bool((temperature > 0).any()),
            num_top_logprobs=int(batch.num_top_logprobs[rows].max()),
            logprobs_mode=self.logprobs_mode,
        )
        min_p = np.array([batch.min_p.get(row, 0.0) for row in rows.tolist()] if batch.min_p else [], dtype=np.float32)
        if min_p.any():
            settings.min_p_B = self._send(min_p)
        return _RowSettings(batch, rows, settings, has_drafts)

    def _add_edits(self, settings: SamplingBatch, batch: InputBatch, rows: np.ndarray, lens: np.ndarray | None) -> None:
        edited = [(index, batch.edits[row]) for index, row in enumerate(rows.tolist()) if row in batch.edits]
        if lens is not None:  # a draft is seen by those behind it
            edited = [
                (index, edits.after(batch.token_ids[rows[index], batch.num_tokens[rows[index]] : lens[index]].tolist()))
                for index, edits in edited
            ]
        settings.edits = gather_edits(edited, self.vocab_size, self._send)
        settings.banned_BW = gather_bans(edited, len(rows), self.vocab_size, self.device)

    def _send(self, array: np.ndarray) -> Tensor:
        return async_tensor_h2d(array, self.device)


def _top(sampled: SampledTokens) -> list[TopLogprobs] | None:
    if sampled.ranks_B is None or sampled.top_ids_BK is None or sampled.top_logprobs_BK is None:
        return None
    columns = sampled.ranks_B.tolist(), sampled.top_ids_BK.tolist(), sampled.top_logprobs_BK.tolist()
    return list(zip(*columns, strict=True))


MAX_ROWS = 256  # of logits at a time: 132 MB in fp32 at DeepSeek-V3's vocabulary


def score_prompts(
    hidden_TH: Tensor, inputs: StepInputs, wanted: dict[int, Request], compute_logits: Callable[[Tensor], Tensor]
) -> list[Request]:
    """Add the prompt log-probs of the step's rows to the requests in `wanted`; rows that are done leave it. Return the
    requests with logits that are not finite.

    By log_softmax(logits) of the raw model. `compute_logits` may be collective over the TP ranks, which all see the
    same inputs.
    """
    failed: list[Request] = []
    firsts = np.cumsum(inputs.query_lens_B) - inputs.query_lens_B
    columns = (inputs.rows_B.tolist(), firsts.tolist(), inputs.query_lens_B.tolist(), inputs.seq_lens_B.tolist())
    for row, first, num_new, seq_len in zip(*columns, strict=True):
        request = wanted.get(row)
        if request is None:
            continue
        # The hidden state at a position predicts the token at the next one.
        computed, known = seq_len - num_new, len(request.prompt_logprobs)
        assert computed <= known, f"{request.request_id}: prompt positions {known} to {computed} were never computed"
        end = min(seq_len, request.num_prompt_tokens - 1)
        if end > known:
            targets = request.token_ids[known + 1 : end + 1]
            hidden = hidden_TH[first + known - computed : first + end - computed]
            _score(request, hidden, targets, compute_logits)
            if not math.isfinite(sum(request.prompt_logprobs[known:])):
                failed.append(request)
        if seq_len >= request.num_prompt_tokens - 1:
            del wanted[row]
    return failed


def _score(request: Request, hidden_TH: Tensor, targets: list[int], compute_logits: Callable[[Tensor], Tensor]) -> None:
    for start in range(0, len(targets), MAX_ROWS):
        logits_TW = compute_logits(hidden_TH[start : start + MAX_ROWS]).float()
        is_finite_T1 = logits_TW.isfinite().all(-1, keepdim=True)
        logprobs_TW = logits_TW.log_softmax(-1)
        targets_T1 = hidden_TH.new_tensor(targets[start : start + MAX_ROWS], dtype=int64)[:, None]
        chosen_T1 = torch.where(is_finite_T1, logprobs_TW.gather(1, targets_T1), float("nan"))
        ranks_T = (logprobs_TW > chosen_T1).sum(-1) + 1
        best = logprobs_TW.topk(min(request.num_prompt_logprobs or 0, logprobs_TW.shape[1]), dim=-1)
        request.prompt_logprobs += chosen_T1[:, 0].tolist()
        request.prompt_top += zip(ranks_T.tolist(), best.indices.tolist(), best.values.tolist(), strict=True)

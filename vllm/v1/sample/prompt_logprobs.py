"""Log-probs of the prompts' own tokens, as their hidden states are computed, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor, int64

from vllm.v1.request import Request, TopLogprobs
from vllm.v1.worker.step_inputs import StepInputs

MAX_ROWS = 256  # of logits at a time: 132 MB in fp32 at DeepSeek-V3's vocabulary


@dataclass
class PromptScores:
    """The prompt log-probs that a step adds to a request."""

    request: Request
    logprobs: list[float] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)  # rank, top ids and log-probs


def score_prompts(
    hidden_TH: Tensor, inputs: StepInputs, wanted: dict[int, Request], compute_logits: Callable[[Tensor], Tensor]
) -> list[PromptScores]:
    """Scores of the step's rows in `wanted`, by log_softmax(logits) of the raw model; rows that are done leave it.

    `compute_logits` may be collective over the TP ranks, which all see the same inputs.
    """
    all_scores = []
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
            all_scores.append(_score(request, hidden, targets, compute_logits))
        if seq_len >= request.num_prompt_tokens - 1:
            del wanted[row]
    return all_scores


def _score(
    request: Request, hidden_TH: Tensor, targets: list[int], compute_logits: Callable[[Tensor], Tensor]
) -> PromptScores:
    scores = PromptScores(request)
    for start in range(0, len(targets), MAX_ROWS):
        logprobs_TW = compute_logits(hidden_TH[start : start + MAX_ROWS]).float().log_softmax(-1)
        targets_T1 = hidden_TH.new_tensor(targets[start : start + MAX_ROWS], dtype=int64)[:, None]
        chosen_T1 = logprobs_TW.gather(1, targets_T1)
        ranks_T = (logprobs_TW > chosen_T1).sum(-1) + 1
        best = logprobs_TW.topk(min(request.num_prompt_logprobs or 0, logprobs_TW.shape[1]), dim=-1)
        scores.logprobs += chosen_T1[:, 0].tolist()
        scores.top += zip(ranks_T.tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
    return scores

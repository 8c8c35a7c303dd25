"""Log-probs of the prompts' own tokens, as their hidden states are computed, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor, int64

from vllm.v1.request import Request
from vllm.v1.worker.input_batch import StepInputs

MAX_ROWS = 256  # of logits at a time: 132 MB in fp32 at DeepSeek-V3's vocabulary


def score_prompts(
    hidden_TH: Tensor, inputs: StepInputs, wanted: dict[int, Request], compute_logits: Callable[[Tensor], Tensor]
) -> None:
    """Add the prompt log-probs of the step's rows to the requests in `wanted`; rows that are done leave it.

    By log_softmax(logits) of the raw model. `compute_logits` may be collective over the TP ranks, which all see the
    same inputs.
    """
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
        if seq_len >= request.num_prompt_tokens - 1:
            del wanted[row]


def _score(request: Request, hidden_TH: Tensor, targets: list[int], compute_logits: Callable[[Tensor], Tensor]) -> None:
    for start in range(0, len(targets), MAX_ROWS):
        logprobs_TW = compute_logits(hidden_TH[start : start + MAX_ROWS]).float().log_softmax(-1)
        targets_T1 = hidden_TH.new_tensor(targets[start : start + MAX_ROWS], dtype=int64)[:, None]
        chosen_T1 = logprobs_TW.gather(1, targets_T1)
        ranks_T = (logprobs_TW > chosen_T1).sum(-1) + 1
        best = logprobs_TW.topk(min(request.num_prompt_logprobs or 0, logprobs_TW.shape[1]), dim=-1)
        request.prompt_logprobs += chosen_T1[:, 0].tolist()
        request.prompt_top += zip(ranks_T.tolist(), best.indices.tolist(), best.values.tolist(), strict=True)

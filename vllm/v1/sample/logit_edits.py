"""Penalties, biases and bans of rows: host state that grows token by token, gathered into a step's tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from vllm.ops.contract import LogitEdits
from vllm.utils import async_tensor_h2d
from vllm.v1.request import Request
from vllm.v1.sample.extras import NO_EXTRAS, SamplingExtras

Send = Callable[[np.ndarray], Tensor]


class TokenCounts:
    """The distinct tokens of a sequence and how often each is in its output; adding one takes constant time."""

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        ids = np.unique(np.array([*prompt, *output], dtype=np.int64))
        self._size = len(ids)
        self._place = dict(zip(ids.tolist(), range(len(ids)), strict=True))
        self._ids = np.zeros(2 * len(ids) + 16, dtype=np.int64)
        self._ids[: len(ids)] = ids
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        for token in output:
            self._counts[self._place[token]] += 1

    @property
    def ids(self) -> np.ndarray:
        """int64 [distinct tokens]."""
        return self._ids[: self._size]

    @property
    def counts(self) -> np.ndarray:
        """fp32 [distinct tokens], in the output; 0 for those of the prompt alone."""
        return self._counts[: self._size]

    def add(self, token: int) -> None:
        place = self._place.setdefault(token, self._size)
        if place == self._size:
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place] = token
            self._size += 1
        self._counts[place] += 1


class RowEdits:
    """The changes of one request to its next logits."""

    def __init__(self, request: Request) -> None:
        self.extras: SamplingExtras = request.extras or NO_EXTRAS
        self._early_bans = sorted(request.stop_ids) if request.min_tokens else []
        self._min_tokens = request.min_tokens
        self._output = request.output_token_ids
        self.seen = None
        if self.extras.has_penalties:
            self.seen = TokenCounts(request.token_ids[: request.num_prompt_tokens], self._output)
        bias = self.extras.logit_bias
        self.bias_ids = np.array([token for token, _ in bias], dtype=np.int64)
        self.bias = np.array([value for _, value in bias], dtype=np.float32)
        allowed = self.extras.allowed_token_ids
        self.allowed = None if allowed is None else np.array(allowed, dtype=np.int64)

    @staticmethod
    def wanted_by(request: Request) -> bool:
        return request.min_tokens > 0 or (request.extras is not None and request.extras.changes_logits)

    def append(self, token: int) -> None:
        """Take the token that was drawn."""
        self._output.append(token)
        if self.seen is not None:
            self.seen.add(token)

    def after(self, tokens: Sequence[int]) -> RowEdits:
        """A copy that has taken `tokens`."""
        if not tokens:
            return self
        later = copy.copy(self)
        later._output, later.seen = [*self._output], copy.deepcopy(self.seen)
        for token in tokens:
            later.append(token)
        return later

    def banned_ids(self) -> list[int]:
        """Return stop tokens before min_tokens, and tokens that would complete a bad word."""
        output = self._output
        banned = list(self._early_bans) if len(output) < self._min_tokens else []
        for word in self.extras.bad_words:
            head = len(word) - 1
            if head == 0 or (len(output) >= head and tuple(output[-head:]) == word[:-1]):
                banned.append(word[-1])
        return banned


def gather_edits(rows: list[tuple[int, RowEdits]], vocab_size: int, send: Send) -> LogitEdits | None:
    """Biases and penalties of `rows`, (index in the step, edits) each; None when they have none."""
    biased = [(index * vocab_size, row) for index, row in rows if len(row.bias_ids)]
    edits = LogitEdits()
    if biased:
        edits.bias_at_M = send(np.concatenate([row.bias_ids + start for start, row in biased]))
        edits.bias_M = send(np.concatenate([row.bias for _, row in biased]))
    seen = [(index * vocab_size, row.seen, row.extras) for index, row in rows if row.seen is not None]
    if seen:
        penalties = [
            extras.frequency_penalty * counts.counts + extras.presence_penalty * (counts.counts > 0)
            for _, counts, extras in seen
        ]
        repetition = [np.full(len(counts.ids), extras.repetition_penalty) for _, counts, extras in seen]
        edits.seen_at_S = send(np.concatenate([counts.ids + start for start, counts, _ in seen]))
        edits.repetition_S = send(np.concatenate(repetition).astype(np.float32))
        edits.penalty_S = send(np.concatenate(penalties).astype(np.float32))
    return edits if biased or seen else None


def gather_bans(
    rows: list[tuple[int, RowEdits]], num_rows: int, vocab_size: int, device: torch.device
) -> Tensor | None:
    """bool [num_rows, W]: what `rows` must not draw; None when that is nothing."""
    allowed = [(index, row.allowed) for index, row in rows if row.allowed is not None]
    places = [index * vocab_size + token for index, row in rows for token in row.banned_ids()]
    if not allowed and not places:
        return None
    banned_BW = torch.zeros(num_rows, vocab_size, dtype=torch.bool, device=device)
    for index, ids in allowed:
        banned_BW[index] = True
        banned_BW[index, async_tensor_h2d(ids, device)] = False
    if places:
        banned_BW.view(-1)[async_tensor_h2d(np.array(places), device)] = True
    return banned_BW

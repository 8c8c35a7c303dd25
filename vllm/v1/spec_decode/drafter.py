"""Drafts: tokens that may come next, which a step verifies. They change speed alone, never a token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from vllm.config import SpeculativeConfig
from vllm.v1.request import Request
from vllm.v1.spec_decode.suffix_automaton import SuffixAutomaton

_Text = TypeVar("_Text")


class Drafter(Protocol):
    """Where drafts come from. It sees the requests of one replica alone, so that all of its ranks draft alike."""

    def draft(self, request: Request, count: int) -> list[int]:
        """At most ``count`` tokens that may follow the request's."""
        ...

    def keep(self, requests: Sequence[Request]) -> None:
        """Forget all requests but these, as far as they are one's own."""
        ...


class Speculation:
    """The drafts of a replica's steps."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self.forget()

    def forget(self) -> None:
        """Begin anew, without any text."""
        self._drafter = _DRAFTERS[self._config.method](self._config)
        self.counts = [0, 0, 0]  # of all requests, as `Request.draft_counts`

    def num_passes(self, num_requests: int) -> int:
        """Passes of the prediction layer behind a step of so many sequences."""
        largest_batch = self._config.disable_by_batch_size
        if self._config.method != "mtp" or (largest_batch is not None and num_requests > largest_batch):
            return 0
        return self._config.num_speculative_tokens

    def note_predictions(self, requests: Sequence[Request], drafts: Mapping[str, list[int]]) -> None:
        """The prediction layer has made these drafts, by request, behind the step of these requests."""
        assert isinstance(self._drafter, _Predictions)
        for request in requests:
            if request.request_id in drafts:
                self._drafter.note(request, drafts[request.request_id])

    def propose(self, requests: Sequence[Request], room: int) -> dict[str, list[int]]:
        """At most ``room`` drafts in all, by request, for those that compute one token in this step."""
        found: dict[str, list[int]] = {}
        most, largest_batch = self._config.num_speculative_tokens, self._config.disable_by_batch_size
        if largest_batch is not None and len(requests) > largest_batch:
            return found
        for request in requests:
            count = min(most, request.max_tokens - request.num_output_tokens - 1, room)
            if count > 0 and len(request.token_ids) - request.num_computed_tokens == 1:
                draft = self._drafter.draft(request, count)
                if draft:
                    found[request.request_id] = draft
                    room -= len(draft)
        self._drafter.keep(requests)
        return found


class _Ngrams:
    """What followed the last tokens of a sequence when they stood in it before."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._lengths = range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1)
        # Of each request where the last of each n-gram ends, and the tokens that were looked at.
        self._texts: dict[Request, tuple[dict[tuple[int, ...], int], int]] = {}

    def draft(self, request: Request, count: int) -> list[int]:
        tokens, (ends, num_seen) = request.token_ids, self._texts.get(request, ({}, 0))
        for end in range(num_seen, len(tokens)):  # not those at the very end
            ends.update((tuple(tokens[end - length : end]), end) for length in self._lengths if length <= end)
        self._texts[request] = ends, len(tokens)
        for length in self._lengths:
            found = ends.get(tuple(tokens[-length:]))
            if found is not None:
                return tokens[found : found + count]
        return []

    def keep(self, requests: Sequence[Request]) -> None:
        self._texts = _of_running(self._texts, requests)


class _Suffixes:
    """What followed the longest part at the end of a sequence when it stood in any sequence before: in its own text, in
    those of its group, and in earlier answers to the same prompt.

    All texts are in one automaton, which is begun anew with those under way when it holds too many tokens.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._most_tokens, self._shortest = config.suffix_max_tokens, config.prompt_lookup_min
        self._automaton = SuffixAutomaton()
        self._texts: dict[Request, tuple[int, int]] = {}  # the state of a request's text, and its tokens that are in it

    def draft(self, request: Request, count: int) -> list[int]:
        if self._automaton.num_tokens > self._most_tokens:
            self._automaton, self._texts = SuffixAutomaton(), {}
        state, num_seen = self._texts.get(request, (0, 0))
        for token in request.token_ids[num_seen:]:
            state = self._automaton.append(state, token)
        self._texts[request] = state, len(request.token_ids)
        return self._automaton.continued(state, count, self._shortest)

    def keep(self, requests: Sequence[Request]) -> None:
        self._texts = _of_running(self._texts, requests)


def _of_running(texts: dict[Request, _Text], requests: Sequence[Request]) -> dict[Request, _Text]:
    """Those of the requests alone, once there are more; a request is itself its key, since an id may come again."""
    return texts if len(texts) <= len(requests) else {one: texts[one] for one in requests if one in texts}


class _Predictions:
    """What the prediction layer has drafted behind the last step."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._drafts: dict[Request, tuple[int, list[int]]] = {}  # with the tokens that the request had then

    def note(self, request: Request, draft: list[int]) -> None:
        self._drafts[request] = len(request.token_ids), draft

    def draft(self, request: Request, count: int) -> list[int]:
        num_tokens, draft = self._drafts.get(request, (0, []))
        return draft[:count] if num_tokens == len(request.token_ids) else []

    def keep(self, requests: Sequence[Request]) -> None:
        self._drafts = _of_running(self._drafts, requests)


_DRAFTERS: dict[str, Callable[[SpeculativeConfig], Drafter]] = {
    "mtp": _Predictions,
    "ngram": _Ngrams,
    "suffix": _Suffixes,
}

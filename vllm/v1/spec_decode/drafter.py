"""Drafts: tokens that may come next, which a step verifies. They change speed alone, never a token."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import numpy as np

from vllm.config import SpeculativeConfig
from vllm.v1.request import Request
from vllm.v1.spec_decode.draft_length import Acceptance, StepCosts, num_worthwhile, num_worthwhile_passes
from vllm.v1.spec_decode.suffix_automaton import new_automaton

_Text = TypeVar("_Text")
_WORD = array("i").itemsize
_LONGEST_PAUSE, _FEWER = 31, 0.75


class Drafter(Protocol):
    """Where drafts come from. It sees the requests of one replica alone, so that all of its ranks draft alike."""

    num_kinds: int

    @property
    def is_empty(self) -> bool:
        """Whether it has no draft for any request."""
        ...

    def draft(self, requests: Sequence[Request], most: int) -> Sequence[tuple[list[int], int]]:
        """At most ``most`` tokens that may follow those of each request, and their kind, below ``num_kinds``: drafts of
        a kind are equally likely to be right.
        """
        ...

    def keep(self, requests: Sequence[Request]) -> None:
        """Forget all requests but these, as far as they are one's own."""
        ...


class Speculation:
    """The drafts of a replica's steps.

    Attributes:
        costs: of the engine's steps; None: a step verifies all drafts.
        num_elsewhere: the most sequences that a replica which steps together with this one had in the last step.
    """

    def __init__(self, config: SpeculativeConfig, drafter: Drafter | None = None) -> None:
        """``drafter``: in place of the method's."""
        self._config, self._given = config, drafter
        self.costs: StepCosts | None = None
        self.num_elsewhere = 0
        self.forget()

    @property
    def needs_costs(self) -> bool:
        return self._config.adaptive and self.costs is None

    def forget(self) -> None:
        """Begin anew, without any text."""
        self._drafter = self._given or _DRAFTERS[self._config.method](self._config)
        self._acceptance = Acceptance(self._drafter.num_kinds, self._config.num_speculative_tokens)
        self._kinds: dict[str, int] = {}  # of the last step's drafts
        self._last_passes = (0, 0), 0
        self._pause_steps = self._pause_left = 0
        self._pause_above = 0.0
        self.counts = [0, 0, 0]  # of all requests, as `Request.draft_counts`

    def num_passes(self, num_requests: int) -> int:
        """Passes of the prediction layer behind a step of so many sequences."""
        if self._config.method != "mtp" or num_requests == 0 or self._is_too_many(num_requests):
            return 0
        if self.costs is None:
            return self._config.num_speculative_tokens
        asked = num_requests, self._acceptance.version
        if asked != self._last_passes[0]:  # nearly as often as a batch or its drafts change
            chances = self._acceptance.chances(0)
            self._last_passes = asked, num_worthwhile_passes(num_requests, chances, self.costs)
        return self._last_passes[1]

    def note_predictions(self, requests: Sequence[Request], drafts: Mapping[str, list[int]]) -> None:
        """The prediction layer has made these drafts, by request, behind the step of these requests."""
        if isinstance(self._drafter, _Predictions):  # else nobody wants them
            for request in requests:
                if request.request_id in drafts:
                    self._drafter.note(request, drafts[request.request_id])

    def propose(self, requests: Sequence[Request], room: int) -> dict[str, list[int]]:
        """At most ``room`` drafts in all, by request, for those that compute one token in this step."""
        found: dict[str, list[int]] = {}
        self._acceptance.end_step()
        if self._is_too_many(len(requests)) or self._drafter.is_empty or self._pauses(len(requests)):
            return found
        self._kinds.clear()
        most = self._config.num_speculative_tokens
        decoding = [
            request
            for request in requests
            if len(request.token_ids) - request.num_computed_tokens == 1
            and request.max_tokens - request.num_output_tokens > 1
        ]
        for request, (draft, kind) in zip(decoding, self._drafter.draft(decoding, most), strict=True):
            del draft[max(0, min(room, request.max_tokens - request.num_output_tokens - 1)) :]
            if draft:
                found[request.request_id], self._kinds[request.request_id] = draft, kind
                room -= len(draft)
        self._drafter.keep(requests)
        worthwhile = self._worthwhile(found, len(requests))
        if found and self._config.method != "mtp":  # whose drafts are made: they cost nothing more
            self._pause_steps = 0 if worthwhile else min(2 * self._pause_steps + 1, _LONGEST_PAUSE)
            self._pause_left, self._pause_above = self._pause_steps, _FEWER * len(requests)
        return worthwhile

    def _pauses(self, num_requests: int) -> bool:
        """Whether drafts did not pay of late, and no fewer sequences run by now: nobody looks for any then."""
        if self._pause_left == 0 or num_requests <= self._pause_above:
            return False
        self._pause_left -= 1
        return True

    def note_verified(self, request: Request, num_drafts: int, num_right: int) -> None:
        """So many drafts of a request were verified, and those of them right."""
        for counts in (request.draft_counts, self.counts):
            counts[:] = [so_far + more for so_far, more in zip(counts, (1, num_drafts, num_right), strict=True)]
        self._acceptance.note(self._kinds[request.request_id], num_drafts, num_right)

    def _is_too_many(self, num_requests: int) -> bool:
        largest_batch = self._config.disable_by_batch_size
        return largest_batch is not None and num_requests > largest_batch

    def _worthwhile(self, drafts: dict[str, list[int]], num_requests: int) -> dict[str, list[int]]:
        """The drafts of a step of so many sequences that are worth its time."""
        if self.costs is None or not drafts:
            return drafts
        owners, chances = list[int](), list[float]()
        for index, (name, draft) in enumerate(drafts.items()):
            owners += [index] * len(draft)
            chances += self._acceptance.chances(self._kinds[name])[: len(draft)]
        best = np.argsort(-np.array(chances), kind="stable")
        least_s = self.costs.plain[self.num_elsewhere] if self.num_elsewhere else 0.0
        count = num_worthwhile(num_requests, np.array(chances)[best], self.costs, least_s)
        if count == len(chances):
            return drafts
        counts = np.bincount(np.array(owners)[best[:count]], minlength=len(drafts)).tolist()
        cut = zip(drafts.items(), counts, strict=True)
        return {name: draft[:num_kept] for (name, draft), num_kept in cut if num_kept}


class _Ngrams:
    """What followed the last tokens of a sequence when they stood in it before; the kind is their number."""

    is_empty = False

    def __init__(self, config: SpeculativeConfig) -> None:
        self._lengths = range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1)
        self.num_kinds = config.prompt_lookup_max + 1
        self._texts: dict[Request, bytearray] = {}  # of each request's tokens, as words

    def draft(self, requests: Sequence[Request], most: int) -> list[tuple[list[int], int]]:
        return [self._draft_of(request, most) for request in requests]

    def _draft_of(self, request: Request, most: int) -> tuple[list[int], int]:
        text = self._texts.setdefault(request, bytearray())
        text += array("i", request.token_ids[len(text) // _WORD :]).tobytes()
        for length in self._lengths:
            end = len(text) - _WORD
            while (found := text.rfind(text[-length * _WORD :], 0, end)) % _WORD and found != -1:
                end = found + length * _WORD - 1
            if found != -1:
                first = found // _WORD + length
                return request.token_ids[first : first + most], length
        return [], 0

    def keep(self, requests: Sequence[Request]) -> None:
        self._texts = _of_running(self._texts, requests)


class _Suffixes:
    """What followed the longest part at the end of a sequence when it stood in any sequence before: in its own text, in
    those of its group, and in earlier answers to the same prompt.

    All texts are in one automaton, which is begun anew with those under way when it holds too many tokens. The kind is
    the number of binary digits of the tokens that stood before.
    """

    num_kinds, is_empty = 8, False

    def __init__(self, config: SpeculativeConfig) -> None:
        self._most_tokens, self._shortest = config.suffix_max_tokens, config.prompt_lookup_min
        self._automaton = new_automaton()
        self._texts: dict[Request, tuple[int, int]] = {}  # the state of a request's text, and its tokens that are in it

    def draft(self, requests: Sequence[Request], most: int) -> list[tuple[list[int], int]]:
        if self._automaton.num_tokens > self._most_tokens:
            self._automaton, self._texts = new_automaton(), {}
        known = [self._texts.get(request, (0, 0)) for request in requests]
        new = [request.token_ids[num_seen:] for request, (_, num_seen) in zip(requests, known, strict=True)]
        ends, found = self._automaton.step([end for end, _ in known], new, most, self._shortest)
        for request, end in zip(requests, ends, strict=True):
            self._texts[request] = end, len(request.token_ids)
        return [(draft, min(matched.bit_length(), self.num_kinds - 1)) for draft, matched in found]

    def keep(self, requests: Sequence[Request]) -> None:
        self._texts = _of_running(self._texts, requests)


class _Predictions:
    """What the prediction layer has drafted behind the last step."""

    num_kinds = 1

    def __init__(self, config: SpeculativeConfig) -> None:
        self._drafts: dict[Request, tuple[int, list[int]]] = {}  # with the tokens that the request had then

    @property
    def is_empty(self) -> bool:
        return not self._drafts

    def note(self, request: Request, draft: list[int]) -> None:
        self._drafts[request] = len(request.token_ids), draft

    def draft(self, requests: Sequence[Request], most: int) -> list[tuple[list[int], int]]:
        found = []
        for request in requests:
            num_tokens, draft = self._drafts.get(request, (0, []))
            found.append((draft[:most] if num_tokens == len(request.token_ids) else [], 0))
        return found

    def keep(self, requests: Sequence[Request]) -> None:
        self._drafts = {}  # a step uses them, or they are old


def _of_running(texts: dict[Request, _Text], requests: Sequence[Request]) -> dict[Request, _Text]:
    """Those of the requests alone, once there are more; a request is itself its key, since an id may come again."""
    return texts if len(texts) <= len(requests) else {one: texts[one] for one in requests if one in texts}


_DRAFTERS: dict[str, Callable[[SpeculativeConfig], Drafter]] = {
    "mtp": _Predictions,
    "ngram": _Ngrams,
    "suffix": _Suffixes,
}

"""A suffix automaton of many texts that grow token by token (Blumer et al., 1985, and for several texts 1987)."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from vllm.ops.cpu.build import kernels, kernels_problem


class Continued(NamedTuple):
    """Tokens that may follow a text, and about how many tokens at its end stood before where they come from."""

    tokens: list[int]
    matched: int


class SuffixAutomaton:
    """Every part of every text is a path from state 0. A state stands for parts that end in the same places; its link
    is the state of their longest end that also ends elsewhere, -1 of state 0.

    Nearly every state has one way out, which lies in arrays: a text's token takes some 70 bytes.
    """

    def __init__(self) -> None:
        self._link, self._length = array("q", [-1]), array("q", [0])  # the length is that of the longest part
        self._token, self._target = (
            array("q", [-1]),
            array("q", [-1]),
        )  # the way out taken last; token -1: there is none
        self._others: dict[int, dict[int, int]] = {}  # of states with several ways, the others

    @property
    def num_tokens(self) -> int:
        """About those of all texts: a token has one or two states."""
        return len(self._link) // 2

    def step(
        self, ends: Sequence[int], texts: Sequence[Sequence[int]], most: int, shortest: int
    ) -> tuple[list[int], list[Continued]]:
        """Append to each text, whose state is in ``ends``, more tokens; return the states then, and at most ``most``
        tokens that followed the longest end of each text where it stood in any text, if that end has at least
        ``shortest`` tokens.
        """
        states: list[int] = []
        for state, tokens in zip(ends, texts, strict=True):
            for token in tokens:
                state = self.append(state, token)
            states.append(state)
        return states, [self.continued(state, most, shortest) for state in states]

    def append(self, end: int, token: int) -> int:
        """``token`` follows in a text whose state is ``end``, 0 of an empty one: return its state then."""
        known = self._after(end, token)
        if known is not None:
            self._lead(end, token, known)
            return self._shortened(end, token, known)
        made = self._add(self._length[end] + 1, 0)
        while end != -1 and (known := self._after(end, token)) is None:
            self._lead(end, token, made)
            end = self._link[end]
        if end != -1 and known is not None:
            self._link[made] = self._shortened(end, token, known)
        return made

    def continued(self, end: int, most: int, shortest: int) -> Continued:
        """What may follow one text, see `step`."""
        found: list[int] = []
        matched = 0
        while len(found) < most:
            while end != -1 and self._token[end] == -1:
                end = self._link[end]
            if end == -1 or self._length[end] < shortest:
                break
            matched = matched or self._length[end]
            found.append(self._token[end])
            end = self._target[end]
        return Continued(found, matched)

    def _after(self, state: int, token: int) -> int | None:
        if self._token[state] == token:
            return self._target[state]
        others = self._others.get(state)
        return None if others is None else others.get(token)

    def _lead(self, state: int, token: int, target: int) -> None:
        last = self._token[state]
        if last not in (-1, token):
            others = self._others.setdefault(state, {})
            others[last] = self._target[state]
            others.pop(token, None)
        self._token[state], self._target[state] = token, target

    def _add(self, length: int, link: int) -> int:
        self._link.append(link)
        self._length.append(length)
        self._token.append(-1)
        self._target.append(-1)
        return len(self._link) - 1

    def _shortened(self, end: int, token: int, state: int) -> int:
        """The state of those parts of ``state``, to which ``token`` leads from ``end``, that are at most one token
        longer than the longest of ``end``: ``state`` itself, or a new one, to which it then links.
        """
        length = self._length[end] + 1
        if self._length[state] == length:
            return state
        made = self._add(length, self._link[state])
        self._token[made], self._target[made] = self._token[state], self._target[state]
        if state in self._others:
            self._others[made] = dict(self._others[state])
        self._link[state] = made
        while end != -1 and self._after(end, token) == state:
            self._redirect(end, token, made)
            end = self._link[end]
        return made

    def _redirect(self, state: int, token: int, target: int) -> None:
        if self._token[state] == token:
            self._target[state] = target
        else:
            self._others[state][token] = target


class NativeSuffixAutomaton:
    """The same in C++, some 30 times as quick."""

    def __init__(self) -> None:
        self._library = kernels()
        self._handle = self._library.cpu_automaton_new()
        weakref.finalize(self, self._library.cpu_automaton_free, self._handle)

    @property
    def num_tokens(self) -> int:
        return int(self._library.cpu_automaton_size(self._handle)) // 2

    def step(
        self, ends: Sequence[int], texts: Sequence[Sequence[int]], most: int, shortest: int
    ) -> tuple[list[int], list[Continued]]:
        """See `SuffixAutomaton.step`."""
        counts = list(map(len, texts))
        tokens = np.fromiter(chain.from_iterable(texts), dtype=np.int64, count=sum(counts))
        states = np.array([ends, counts, [0] * len(ends), [0] * len(ends)], dtype=np.int64)
        drafts = np.empty((len(ends), most), dtype=np.int64)
        row_bytes = states.strides[0]
        first = states.ctypes.data
        self._library.cpu_automaton_step(
            self._handle,
            len(ends),
            first,
            first + row_bytes,
            tokens.ctypes.data,
            most,
            shortest,
            drafts.ctypes.data,
            first + 2 * row_bytes,
            first + 3 * row_bytes,
        )
        new_ends, _, found, matched = states.tolist()
        rows = zip(drafts.tolist(), found, matched, strict=True)
        return new_ends, [Continued(row[:count], length) for row, count, length in rows]


def new_automaton() -> SuffixAutomaton | NativeSuffixAutomaton:
    """An empty automaton; in Python where there is no compiler."""
    return SuffixAutomaton() if kernels_problem() else NativeSuffixAutomaton()

"""A suffix automaton of many texts that grow token by token (Blumer et al., 1985, and for several texts 1987)."""

from __future__ import annotations

from array import array


class SuffixAutomaton:
    """Every part of every text is a path from state 0. A state stands for parts that end in the same places; its link
    is the state of their longest end that also ends elsewhere, -1 of state 0.

    Nearly every state has one way out, which lies in arrays: a text's token takes some 70 bytes.
    """

    def __init__(self) -> None:
        self._link, self._length = array("q", [-1]), array("q", [0])  # the length is that of the longest part
        self._token, self._target = array("q", [-1]), array("q", [-1])  # the newest way out; token -1: there is none
        self._others: dict[int, dict[int, int]] = {}  # of states with several ways, the older ones

    @property
    def num_tokens(self) -> int:
        """About those of all texts: a token has one or two states."""
        return len(self._link) // 2

    def append(self, end: int, token: int) -> int:
        """``token`` follows in a text whose state is ``end``, 0 of an empty one: return its state then."""
        known = self._after(end, token)
        if known is not None:
            return self._shortened(end, token, known)
        made = self._add(self._length[end] + 1, 0)
        while end != -1 and (known := self._after(end, token)) is None:
            self._lead(end, token, made)
            end = self._link[end]
        if end != -1 and known is not None:
            self._link[made] = self._shortened(end, token, known)
        return made

    def continued(self, end: int, count: int, shortest: int) -> list[int]:
        """At most ``count`` tokens that followed the longest end of a text, whose state is ``end``, where it stood in
        any text, if that end has at least ``shortest`` tokens.
        """
        found: list[int] = []
        while len(found) < count:
            while end != -1 and self._token[end] == -1:
                end = self._link[end]
            if end == -1 or self._length[end] < shortest:
                break
            found.append(self._token[end])
            end = self._target[end]
        return found

    def _after(self, state: int, token: int) -> int | None:
        if self._token[state] == token:
            return self._target[state]
        others = self._others.get(state)
        return None if others is None else others.get(token)

    def _lead(self, state: int, token: int, target: int) -> None:
        newest = self._token[state]
        if newest not in (-1, token):
            others = self._others.setdefault(state, {})
            others[newest] = self._target[state]
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

"""The text of a sample while it grows, and where a stop string ends it. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

# A character has at most four bytes and a token at least one: more tokens than this without a whole character are not
# the beginning of one.
_MAX_PENDING_TOKENS = 8
_INCOMPLETE = "\ufffd"


class IncrementalDetokenizer:
    """Decodes token by token; a character waits for its last byte. Concatenated, the pieces are the text of all tokens.

    Once the first stop string is complete `text` ends before it (behind it with `include_stop`); one that ends within
    the first `min_tokens` tokens does not count.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.text = ""
        self.stop_reason: str | None = None  # the stop string that was found
        self._decode, self._stop, self._include_stop, self._min_tokens = decode, stop, include_stop, min_tokens
        self._ids: list[int] = []
        # The text of ids[:_end] is out; decoding begins at _begin, because a token's text depends on the one before.
        self._begin = self._end = 0
        self._num_shown = 0  # characters that `append` has returned

    def push(self, token: int) -> bool:
        """Take the next token; whether the text has met a stop string."""
        if self.stop_reason is None:
            self._ids.append(token)
            num_before = len(self.text)
            self.text += self._next_piece()
            if self._stop and len(self.text) > num_before and len(self._ids) > self._min_tokens:
                self._cut_at_stop(num_before)
        return self.stop_reason is not None

    def append(self, token_ids: Iterable[int], is_finished: bool = False) -> str:
        """Take the next tokens; returns what can be shown since the last call, all that is left when finished."""
        for token in token_ids:
            self.push(token)
        if is_finished and self.stop_reason is None:
            self.text += self._next_piece(is_last=True)
        end = len(self.text) if is_finished or self.stop_reason is not None else self._settled_length()
        piece = self.text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        return piece

    def __getstate__(self) -> dict[str, Any]:
        """All but the tokenizer, which stays where it is: `attach` gives another one."""
        return {**self.__dict__, "_decode": None}

    def attach(self, decode: Callable[[list[int]], str]) -> None:
        """Go on, after a copy, with this tokenizer."""
        self._decode = decode

    def catch_up(self, token_ids: Sequence[int]) -> None:
        """Take what is new in all tokens of the sample."""
        for token in token_ids[len(self._ids) :]:
            self.push(token)

    def _settled_length(self) -> int:
        """Characters before an end of the text that may become a stop string."""
        if self._include_stop:
            return len(self.text)
        longest = min(len(self.text), max(map(len, self._stop), default=1) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stop):
                return len(self.text) - length
        return len(self.text)

    def _next_piece(self, is_last: bool = False) -> str:
        """The text of the tokens that are not out; `is_last`: also of those that still wait for their last byte."""
        piece = self._pending_text()
        is_waiting = not is_last and piece.endswith(_INCOMPLETE) and len(self._ids) - self._end < _MAX_PENDING_TOKENS
        if not piece or is_waiting:
            return ""
        self._begin, self._end = self._end, len(self._ids)
        return piece

    def _pending_text(self) -> str:
        shown, text = self._decode(self._ids[self._begin : self._end]), self._decode(self._ids[self._begin :])
        # A tokenizer with a token per byte decodes all bytes in a row as broken once one is; what is out stays.
        return text[len(shown) :] if text.startswith(shown) else self._decode(self._ids[self._end :])

    def _cut_at_stop(self, num_before: int) -> None:
        found = [
            (start, stop)
            for stop in self._stop
            if (start := self.text.find(stop, max(0, num_before - len(stop) + 1))) >= 0
        ]
        if found:
            start, self.stop_reason = min(found, key=lambda place: place[0])
            self.text = self.text[: start + len(self.stop_reason) if self._include_stop else start]

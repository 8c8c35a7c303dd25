"""A conversation as token ids: what the model was given and wrote stays as it is, and the template adds to it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_formats.chat import chat_text
from verl.experimental.agent_loop.environment import Message


@dataclass(frozen=True)
class Given:
    """Token ids that the model is given next, behind the first ``num_kept`` of the row; None: behind all of it."""

    token_ids: list[int]
    num_kept: int | None = None


def num_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(one), len(other)))


class Conversation:
    """Renders only what is new by the chat template, so that no token is ever made from text a second time.

    Args:
        tools: OpenAI function schemas that the template shows the model.
        template_kwargs: ``data.apply_chat_template_kwargs``.
        end_ids: tokens that end a turn.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any],
        end_ids: Collection[int],
    ) -> None:
        self._tokenizer, self._end_ids = tokenizer, frozenset(end_ids)
        self._special_ids = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
        self._template = {**({"tools": list(tools)} if tools else {}), **template_kwargs}
        self._messages: list[Message] = []
        self._text = ""  # of the row, as the template writes it
        self._row: list[int] = []

    def begin(self, messages: Sequence[Message]) -> list[int]:
        """The row's first token ids."""
        self._messages = [dict(message) for message in messages]
        self._text = self._rendered()
        self._row = self._ids(self._text)
        return list(self._row)

    def answer(self, token_ids: Sequence[int]) -> None:
        """The model's turn."""
        self._row += token_ids
        self._text += self._decoded(token_ids)
        has_end = bool(token_ids) and token_ids[-1] in self._end_ids
        content = self._decoded(token_ids[:-1] if has_end else token_ids)
        self._messages.append({"role": "assistant", "content": content})

    def follow(self, messages: Sequence[Message]) -> Given:
        """What follows the turn: the template's end of it where the model wrote none, ``messages``, and the next turn.

        Where the template changes what stands before, as some leave out old thoughts, a new row begins. It keeps the
        tokens before the change, up to the last special one, behind which text is tokenised as by itself.
        """
        self._messages += [dict(message) for message in messages]
        before, self._text = self._text, self._rendered()
        if self._text.startswith(before):
            given = Given(self._ids(self._text[len(before) :]))
        else:
            num_kept, text = self._kept()
            del self._row[num_kept:]
            given = Given(self._ids(self._text[len(text) :]), num_kept)
        self._row += given.token_ids
        return given

    def _kept(self) -> tuple[int, str]:
        """How many tokens of the row the new text still begins with, and their text."""
        for count in range(len(self._row), 0, -1):
            if self._row[count - 1] in self._special_ids:
                text = self._decoded(self._row[:count])
                if self._text.startswith(text):
                    return count, text
        return 0, ""

    def _rendered(self) -> str:
        return chat_text(self._tokenizer, self._messages, **self._template)

    def _ids(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

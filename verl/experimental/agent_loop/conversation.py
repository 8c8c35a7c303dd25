"""A conversation as token ids: what the model was given and wrote stays as it is, and the template adds to it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.experimental.agent_loop.environment import Message


@dataclass(frozen=True)
class Given:
    """Token ids that the model is given next. ``is_new_row``: they replace all before them, else they follow it."""

    token_ids: list[int]
    is_new_row: bool = False


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
        self._template = {**({"tools": list(tools)} if tools else {}), **template_kwargs}
        self._messages: list[Message] = []
        self._text = ""  # of the row, as the template writes it

    def begin(self, messages: Sequence[Message]) -> Given:
        self._messages = [dict(message) for message in messages]
        self._text = self._rendered()
        return Given(self._ids(self._text), is_new_row=True)

    def answer(self, token_ids: Sequence[int]) -> None:
        """The model's turn."""
        self._text += self._decoded(token_ids)
        has_end = bool(token_ids) and token_ids[-1] in self._end_ids
        content = self._decoded(token_ids[:-1] if has_end else token_ids)
        self._messages.append({"role": "assistant", "content": content})

    def follow(self, messages: Sequence[Message]) -> Given:
        """What follows the turn: the template's end of it where the model wrote none, ``messages``, and the next turn.

        A new row, where the template changes what stands before, as some leave out old thoughts.
        """
        self._messages += [dict(message) for message in messages]
        before, self._text = self._text, self._rendered()
        if self._text.startswith(before):
            return Given(self._ids(self._text[len(before) :]))
        return Given(self._ids(self._text), is_new_row=True)

    def _rendered(self) -> str:
        try:
            chat = self._tokenizer.apply_chat_template
            return str(chat(self._messages, add_generation_prompt=True, tokenize=False, **self._template))
        except Exception as error:  # whatever a template raises about messages that it refuses
            raise ValueError(f"the chat template does not take these messages: {error}") from error

    def _ids(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

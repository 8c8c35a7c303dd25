"""Conversations as text, by a tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NO_TEMPLATE = (
    "the tokenizer has no chat template, as those of many base models: put one into the model's folder as "
    "chat_template.jinja, or give it (data.apply_chat_template_kwargs.chat_template of a run)"
)


def chat_text(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **template_kwargs: Any) -> str:
    """What ``tokenizer.apply_chat_template`` makes of messages with role and content, for the assistant to answer.

    ``template_kwargs`` are further arguments of that, or variables of the template. ValueError for messages that the
    template refuses, and for content that is no text.
    """
    texts = [with_text_content(message) for message in messages]
    try:
        text = tokenizer.apply_chat_template(texts, **{"add_generation_prompt": True} | template_kwargs, tokenize=False)
    except Exception as error:  # whatever a template raises about messages that it refuses
        if getattr(tokenizer, "chat_template", "") is None and "chat_template" not in template_kwargs:
            raise ValueError(NO_TEMPLATE) from error
        raise ValueError(f"the chat template does not take these messages: {error}") from error
    return str(text)


def with_text_content(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its content as one text, which templates ask for: of parts of text a line each; ValueError."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message)
    if not isinstance(content, Sequence):
        raise ValueError(f"the content of a message is {content!r}, neither text nor a list of parts")
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    for part, text in zip(content, texts, strict=True):
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise ValueError(f"the content of a message has a part of type {kind!r}; models take text only")
    return {**message, "content": "\n".join(map(str, texts))}

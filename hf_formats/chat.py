"""Conversations as text, by a tokenizer's chat template."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

NO_TEMPLATE = (
    "the tokenizer has no chat template, as those of many base models: put one into the model's folder as "
    "chat_template.jinja, or give it (data.apply_chat_template_kwargs.chat_template of a run)"
)


def chat_text(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **template_kwargs: Any) -> str:
    """What ``tokenizer.apply_chat_template`` makes of messages with role and content, for the assistant to answer.

    ``template_kwargs`` are further arguments of that, or variables of the template. ValueError for messages that the
    template refuses, for content that is no text, and for tool calls that the template does not write.
    """
    given = {"add_generation_prompt": True} | template_kwargs
    texts = [with_text_content(message) for message in messages]
    if not any(message.get("tool_calls") for message in texts):
        return _rendered(tokenizer, texts, given)
    problem: ValueError | None = None
    for form in _forms_of_calls(texts):
        try:
            text = _rendered(tokenizer, form, given)
        except ValueError as error:
            problem = problem or error
            continue
        try:
            bare = [{name: value for name, value in message.items() if name != "tool_calls"} for message in form]
            if text != _rendered(tokenizer, bare, given):
                return text
        except ValueError:  # it asks for the calls
            return text
    raise problem or ValueError("the chat template leaves out the messages' tool calls; give one that writes them")


def _forms_of_calls(messages: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Templates differ in what a message is that calls: most write its arguments as JSON and take its text, if any.
    DeepSeek-V3's knows one by a content that is null, and adds its arguments to a text.
    """
    for no_content, as_text in itertools.product(("", None), (False, True)):
        form = [dict(message) for message in messages]
        for message in form:
            if calls := message.get("tool_calls"):
                message["tool_calls"] = [_with_arguments(call, as_text) for call in calls]
                message["content"] = message["content"] or no_content
        yield form


def _with_arguments(call: Any, as_text: bool) -> Any:
    try:
        given = call["function"]["arguments"]
        if isinstance(given, str) != as_text:
            given = json.dumps(given) if as_text else json.loads(given)
        return call | {"function": call["function"] | {"arguments": given}}
    except (TypeError, KeyError, ValueError, RecursionError):
        return call  # the template may know what it is


def _rendered(tokenizer: Any, messages: list[dict[str, Any]], given: Mapping[str, Any]) -> str:
    try:
        if any(message["content"] is None for message in messages):
            return _with_nulls(tokenizer, messages, **given)
        return str(tokenizer.apply_chat_template(messages, **given, tokenize=False))
    except Exception as error:  # whatever a template raises about messages that it refuses
        if getattr(tokenizer, "chat_template", "") is None and "chat_template" not in given:
            raise ValueError(NO_TEMPLATE) from error
        raise ValueError(f"the chat template does not take these messages: {error}") from error


def _with_nulls(tokenizer: Any, messages: list[dict[str, Any]], chat_template: str | None = None, **given: Any) -> str:
    """As ``tokenizer.apply_chat_template``, which leaves out what is null."""
    from transformers.utils.chat_template_utils import render_jinja_template

    template = tokenizer.get_chat_template(chat_template, given.get("tools"))
    variables = tokenizer.special_tokens_map | given
    [text], _ = render_jinja_template(conversations=[messages], chat_template=template, **variables)
    return str(text)


def with_text_content(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its content as one text, which templates ask for: of parts of text a line each; ValueError."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return {**message, "content": content or ""}
    if not isinstance(content, Sequence):
        raise ValueError(f"the content of a message is {content!r}, neither text nor a list of parts")
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    for part, text in zip(content, texts, strict=True):
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise ValueError(f"the content of a message has a part of type {kind!r}; models take text only")
    return {**message, "content": "\n".join(map(str, texts))}

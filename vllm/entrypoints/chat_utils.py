"""Conversations as prompts, by the tokenizer's chat template or another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_formats.chat import chat_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]  # role and content, as OpenAI's interface has them


def resolve_hf_chat_template(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None, *ignored: Any, **unused: Any
) -> str | None:
    """The template that a conversation is rendered by: `chat_template`, or the tokenizer's own; None without either.

    Further arguments of vLLM's function (tools, a model config) choose between templates of other models.
    """
    own = tokenizer.chat_template
    return chat_template if chat_template is not None else (str(own) if own is not None else None)


def conversation_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    chat_template: str | None = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **template_kwargs: Any,
) -> str:
    """The text of a conversation; ValueError without a template, or for messages that it does not take."""
    template = resolve_hf_chat_template(tokenizer, chat_template)
    if template is None:
        raise ValueError("the tokenizer has no chat template: give chat_template, or use LLM.generate")
    return chat_text(
        tokenizer,
        messages,
        chat_template=template,
        add_generation_prompt=add_generation_prompt and not continue_final_message,
        continue_final_message=continue_final_message,
        **template_kwargs,
    )

"""The tokenizer of a model directory."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_formats.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_THOUGHT_TAGS = {"<think>", "</think>"}


def set_pad_token_id(tokenizer: PreTrainedTokenizerBase) -> None:
    """Makes the end token the pad token where there is none, with a warning."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id, tokenizer.pad_token = tokenizer.eos_token_id, tokenizer.eos_token
        text = f"the tokenizer has no pad token; it is the end token now, {tokenizer.eos_token_id}"
        warnings.warn(text, stacklevel=2)


def hf_tokenizer(
    name_or_path: str, correct_pad_token: bool = True, correct_gemma2: bool = True, **kwargs: Any
) -> PreTrainedTokenizerBase:
    """The tokenizer in ``name_or_path``; no code from the directory is executed, whatever ``trust_remote_code`` says.

    Args:
        name_or_path: a directory, or a name that transformers knows.
        correct_pad_token: the pad token defaults to the end token.
        correct_gemma2: the end token of Gemma 2's chat models is the one that ends a turn.
        kwargs: of ``AutoTokenizer.from_pretrained``.

    Raises:
        ValueError: it cannot be read, needs code of its own, or has no end token.
    """
    if kwargs.pop("trust_remote_code", False):
        logger.info("trust_remote_code=True: the tokenizer in %s is read without executing its code", name_or_path)
    if correct_gemma2 and "gemma-2-2b-it" in str(name_or_path):
        kwargs.setdefault("eos_token", "<end_of_turn>")
    tokenizer = load_tokenizer(name_or_path, **kwargs)
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer in {name_or_path} has no end-of-sequence token; set eos_token in tokenizer_config.json"
        )
    if correct_pad_token:
        set_pad_token_id(tokenizer)
    return tokenizer


def texts_to_grade(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[int]]) -> list[str]:
    """The texts of ``rows`` of token ids without special tokens, but with the tags of a thought, which rewards read.

    Some tokenizers have a special token for each tag, others a plain one or several. No space is cleaned up.
    """
    special = {token: added.content for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    has_tags = bool(_THOUGHT_TAGS & set(special.values()))
    if has_tags:
        hidden = {token for token, content in special.items() if content not in _THOUGHT_TAGS}
        rows = [[token for token in row if token not in hidden] for row in rows]
    decoded = tokenizer.batch_decode(rows, skip_special_tokens=not has_tags, clean_up_tokenization_spaces=False)
    return [str(text) for text in decoded]

"""The checkpoint's tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def get_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer in directory `path`; ValueError when there is none that can be read."""
    from transformers import AutoTokenizer  # slow to import, and not needed for prompts given as token ids

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer={path} cannot be loaded: {error}; give its directory, or skip_tokenizer_init=True and token ids"
        ) from error

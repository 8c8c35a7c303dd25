"""The tokenizer of a model directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def hf_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer in ``path``; no code from the directory is executed. Its pad token defaults to its end token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer in {path} has no end-of-sequence token; set eos_token in tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer

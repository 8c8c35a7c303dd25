"""The checkpoint's tokenizer."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_formats.end_tokens import tokenizer_end_token
from hf_formats.tokenizer import CONFIG_FILE, FAST_FILE, load_tokenizer, tokenizer_problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def get_tokenizer(
    tokenizer_name: str,
    *,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    **options: Any,
) -> PreTrainedTokenizerBase:
    """The tokenizer in a directory, loaded with transformers' `options`; ValueError when it cannot be read.

    Modes and remote code change nothing, as for `LLM`; a revision is refused.
    """
    if revision is not None:
        raise ValueError(f"revision={revision!r}: tokenizers are directories, download that revision into one")
    return LazyTokenizer(tokenizer_name, **options).load()


class LazyTokenizer:
    """The tokenizer in a directory, loaded when text is first asked for: transformers takes a second and 30 MB, and an
    engine of token ids needs none of it.

    ValueError, from the constructor, for files that cannot be loaded; without a `tokenizer.json` it loads at once.
    """

    def __init__(self, path: str, **options: Any) -> None:
        self._path, self._options = path, options
        if problem := tokenizer_problem(Path(path)):
            raise self._error(problem)
        if not (Path(path) / FAST_FILE).is_file():
            self.load()

    def load(self) -> PreTrainedTokenizerBase:
        """The same one every time; ValueError when it cannot be read."""
        return self._loaded

    @cached_property
    def end_token_id(self) -> int | None:
        """The token that ends a text, as the tokenizer's files name it. Where a tokenizer_config.json leaves it to its
        tokenizer_class, the tokenizer is loaded; without that file none is named.
        """
        named = tokenizer_end_token(self._path)
        if named is None and (Path(self._path) / CONFIG_FILE).is_file():
            return self.load().eos_token_id
        return named

    @cached_property
    def _loaded(self) -> PreTrainedTokenizerBase:
        try:
            return load_tokenizer(self._path, **self._options)
        except ValueError as error:
            raise self._error(error) from error

    def _error(self, problem: object) -> ValueError:
        return ValueError(
            f"tokenizer={self._path} cannot be loaded: {problem}; give its directory, or skip_tokenizer_init=True and "
            "token ids"
        )

"""The checkpoint's tokenizer."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_formats.end_tokens import tokenizer_end_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILE_NAME = "tokenizer.json"
_LARGEST_BLANK_END = 64  # bytes


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

    ValueError, from the constructor, for a `tokenizer.json` that is cut short; where there is none, it loads at once.
    """

    def __init__(self, path: str, **options: Any) -> None:
        self._path, self._options = path, options
        file = Path(path) / FILE_NAME
        if not file.is_file():
            self.load()
        elif not _is_whole(file):
            raise ValueError(f"tokenizer={path} cannot be loaded: {file} does not end as JSON does; is it truncated?")

    def load(self) -> PreTrainedTokenizerBase:
        """The same one every time; ValueError when it cannot be read."""
        return self._loaded

    @cached_property
    def end_token_id(self) -> int | None:
        """The token that ends a text; loads the tokenizer only where its files do not name one."""
        named = tokenizer_end_token(self._path)
        return self.load().eos_token_id if named is None else named

    @cached_property
    def _loaded(self) -> PreTrainedTokenizerBase:
        from transformers import AutoTokenizer  # see the class

        try:
            return AutoTokenizer.from_pretrained(self._path, **self._options)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"tokenizer={self._path} cannot be loaded: {error}; give its directory, or skip_tokenizer_init=True "
                "and token ids"
            ) from error


def _is_whole(file: Path) -> bool:
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - _LARGEST_BLANK_END))
        return stream.read().rstrip().endswith(b"}")

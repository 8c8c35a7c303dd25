"""The end token that a tokenizer's files name, which the model's config may not, and exports that name it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_formats.config import GENERATION_CONFIG, end_token_ids, read_config_dict


def tokenizer_end_token(directory: str | Path) -> int | None:
    """Return the id of ``eos_token`` in a tokenizer's directory; None where its JSON files do not say.

    ValueError for a file that is not JSON.
    """
    folder = Path(directory)
    config = _json(folder / "tokenizer_config.json")
    named = config.get("eos_token") or _json(folder / "special_tokens_map.json").get("eos_token")
    content = named.get("content") if isinstance(named, Mapping) else named
    if not isinstance(content, str):
        return None
    for token, added in (config.get("added_tokens_decoder") or {}).items():
        if isinstance(added, Mapping) and added.get("content") == content and token.isdecimal():
            return int(token)
    return _id_in_vocabulary(content, _json(folder / "tokenizer.json"))


def with_end_token(directory: Path) -> dict[str, Any] | None:
    """Return a generation_config.json for a whole HF directory that names its tokenizer's end token as well; None where
    that file or config.json names it already.
    """
    token, known = tokenizer_end_token(directory), end_token_ids(directory)
    if token is None or token in known:
        return None
    return _json(directory / GENERATION_CONFIG) | {"eos_token_id": [token, *known]}


def _id_in_vocabulary(content: str, tokenizer: Mapping[str, Any]) -> int | None:
    for added in tokenizer.get("added_tokens") or ():
        if added.get("content") == content:
            return int(added["id"])
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, Mapping):
        found = vocabulary.get(content)
    else:  # of unigram models, [piece, score] each
        found = next((index for index, (piece, *_) in enumerate(vocabulary) if piece == content), None)
    return None if found is None else int(found)


def _json(file: Path) -> dict[str, Any]:
    return read_config_dict(file) if file.is_file() else {}

"""The tokenizer of a model directory, loaded without executing code of the directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FAST_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
# Vocabularies that transformers' own classes read; it cannot split text as the owner of a tiktoken file does.
_OWN_VOCABULARIES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")
_REMEDY = f"put the same tokenizer there in the fast form, as {FAST_FILE}: docs/models.md says how to make it"
_LARGEST_BLANK_END = 64  # bytes
_PROBE = "It's 6 * 7, isn't it?\n\n  12345 Über e\u0301 中文 🙂."  # what tokenizers cut in ways of their own


def tokenizer_problem(path: Path) -> str | None:
    """Return why the directory's tokenizer cannot be loaded, as its files show it; None when they show nothing."""
    try:
        config = _config(path)
    except ValueError as error:
        return str(error)
    fast = path / FAST_FILE
    if fast.is_file():
        return None if _is_whole(fast) else f"{fast} does not end as JSON does; is it truncated?"
    tiktoken = [*path.glob("tiktoken.model"), *path.glob("*.tiktoken")]
    if tiktoken or "auto_map" in config:
        files = sorted(file.name for file in (*tiktoken, *path.glob("tokenization_*.py")))
        return (
            f"{path} has no {FAST_FILE}, and its tokenizer ({', '.join(files) or CONFIG_FILE}) needs code of its own, "
            f"which is never executed; {_REMEDY}"
        )
    if any((path / name).is_file() for name in _OWN_VOCABULARIES):
        return None
    return f"{path} has no tokenizer ({FAST_FILE}, {CONFIG_FILE}): copy those of the model there"


def load_tokenizer(path: str, **options: Any) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a directory, or of a name that transformers knows, with transformers' `options`.

    ValueError when it cannot be read, or needs code of its own.
    """
    import transformers  # it takes a second, which checks of files need not wait for

    config: dict[str, Any] = {}
    folder = Path(path).expanduser()
    if folder.is_dir():
        if problem := tokenizer_problem(folder):
            raise ValueError(problem)
        path, config = str(folder), _config(folder)
    # A tokenizer.json can be read whatever class its owner gave it; AutoTokenizer loads a table of all models.
    name = str(config.get("tokenizer_class") or "AutoTokenizer")
    is_plain = name == "PreTrainedTokenizerFast" or "auto_map" in config or not hasattr(transformers, name)
    plain, fast = transformers.PreTrainedTokenizerFast, folder / FAST_FILE
    try:
        if is_plain:
            return plain.from_pretrained(path, trust_remote_code=False, **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False, **options)
        # transformers 5 builds some classes' tokenizers anew: its 5.16 cuts DeepSeek-V3's text without spaces.
        if fast.is_file() and tokenizer(_PROBE, add_special_tokens=False)["input_ids"] != _ids_as_written(fast):
            return plain.from_pretrained(path, trust_remote_code=False, **options)
        return tokenizer
    except Exception as error:  # transformers and tokenizers raise anything about a file of another form
        advice = f"; {_REMEDY}" if folder.is_dir() and not fast.is_file() else ""
        text = " ".join(f"{type(error).__name__}: {error}".split())  # theirs may have several lines
        raise ValueError(f"the tokenizer in {path} cannot be loaded: {text}{advice}") from error


def _ids_as_written(fast: Path) -> list[int]:
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(fast)).encode(_PROBE, add_special_tokens=False).ids


def _config(path: Path) -> dict[str, Any]:
    """Return tokenizer_config.json; empty when there is none."""
    file = path / CONFIG_FILE
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} is not a JSON object")
    return config


def _is_whole(file: Path) -> bool:
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - _LARGEST_BLANK_END))
        return stream.read().rstrip().endswith(b"}")

"""The model that a run would start from: whether its tokenizer can be loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hf_formats.tokenizer import tokenizer_problem
from tools.doctor.finding import Finding


def tokenizer(model_path: str | None) -> Iterator[Finding]:
    """The tokenizer of MODEL_PATH; nothing where it is not given, or is a hub's name and has not been fetched."""
    if not model_path or not Path(model_path).is_dir():
        return
    problem = tokenizer_problem(Path(model_path))
    yield Finding("tokenizer", model_path, problem or "", is_fatal=problem is not None)

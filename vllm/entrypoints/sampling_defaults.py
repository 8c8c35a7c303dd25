"""Defaults of sampling, for who does not say: the model's generation_config.json, or SamplingParams' own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.sampling_params import SamplingParams

FILE_NAME = "generation_config.json"
FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class SamplingDefaults:
    """Values of SamplingParams for what a request leaves out, and the most tokens that any sample may have."""

    values: dict[str, float] = field(default_factory=dict)
    max_tokens: int | None = None

    def __str__(self) -> str:
        limit = {} if self.max_tokens is None else {"max_tokens (of every request)": self.max_tokens}
        return ", ".join(f"{name}={value}" for name, value in {**self.values, **limit}.items())

    def sampling_params(self) -> SamplingParams:
        """The parameters of a call that is given none."""
        given: dict[str, Any] = {**self.values, "max_tokens": self.max_tokens}
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def sampling_defaults(model_dir: str, source: str, override: str | Mapping[str, Any] | None) -> SamplingDefaults:
    """The defaults by `source`: "auto" reads the model's directory, "vllm" reads nothing, else another directory.

    `override` has further values, or is a JSON object with them. ValueError for a file or an override that cannot be
    read.
    """
    found: dict[str, Any] = {}
    file = Path(model_dir if source == "auto" else source) / FILE_NAME
    if source != "vllm" and (source != "auto" or file.is_file()):
        found = _read(str(file), _text(file))
    if override is not None:
        found |= _read("override_generation_config", override) if isinstance(override, str) else override
    values = {name: found[name] for name in FIELDS if found.get(name) is not None}
    limit = found.get("max_new_tokens")
    try:
        SamplingParams(**values, max_tokens=limit)
    except (ValueError, TypeError) as error:
        raise ValueError(f"generation_config={source!r}: {error}; generation_config='vllm' reads no file") from error
    return SamplingDefaults(values, limit)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"generation_config: {file} cannot be read: {error.strerror}") from error


def _read(name: str, text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{name} must be a JSON object")
    return values

"""config.json of a Hugging Face model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_config_dict(path: str | Path) -> dict[str, Any]:
    """The raw config.json at ``path`` (file or directory)."""
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist; give a directory in Hugging Face form (config.json inside)") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{file} holds a JSON {type(raw).__name__}; expected an object of model dimensions")
    return raw

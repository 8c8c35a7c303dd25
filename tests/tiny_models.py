"""Tiny models of every family's real form, from the files of ``tests/families``, one for each.

A family's file has ``CONFIGS``, name -> config.json, whose first entry is the plain form, and ``AS_TRANSFORMERS``, keys
that transformers needs otherwise (a model that it knows under another name).
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.mindspeed_llm.tiny import write_tiny_checkpoint

Config = dict[str, Any]
_MODULES: list[ModuleType] = [
    importlib.import_module(f"tests.families.{found.name}")
    for found in pkgutil.iter_modules([str(Path(__file__).with_name("families"))])
    if not found.name.startswith("test_")
]
CONFIGS: dict[str, Config] = {name: config for module in _MODULES for name, config in module.CONFIGS.items()}
PLAIN = [next(iter(module.CONFIGS)) for module in _MODULES]
"""The name of one model of each family."""


def write_model(folder: Path, model: str | Config, seed: int, dtype: torch.dtype | None = None) -> tuple[Path, Path]:
    """Write a model, one of ``CONFIGS`` or another; its folder, and one of the same weights in transformers' words."""
    config = CONFIGS[model] if isinstance(model, str) else model
    write_tiny_checkpoint(folder / "ours", config, seed, dtype)
    changes = next((found.AS_TRANSFORMERS for found in _MODULES if config in found.CONFIGS.values()), {})
    if not changes:
        return folder / "ours", folder / "ours"
    theirs = folder / "theirs"
    theirs.mkdir()
    for file in (folder / "ours").iterdir():
        (theirs / file.name).symlink_to(file)
    config = json.loads((theirs / "config.json").read_text()) | changes
    (theirs / "config.json").unlink()
    (theirs / "config.json").write_text(json.dumps(config))
    return folder / "ours", theirs

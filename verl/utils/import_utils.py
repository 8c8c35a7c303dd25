"""Loading what a config names: a function of a package, or a user's function in a file."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any


def load_provider(provider: str) -> Any:
    """The object that ``module:name`` names: how optional packages are reached without importing them from here."""
    module_name, _, name = provider.partition(":")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"provider {provider!r} cannot be loaded: {error}; expected 'module:name'") from error


def load_extern_type(file_path: str, type_name: str) -> Any:
    """The object ``type_name`` of the Python file ``file_path``; ValueError says what is missing."""
    path = Path(file_path).expanduser()
    if not path.is_file():
        raise ValueError(f"{file_path} does not exist; custom code is given as the path of a Python file")
    digest = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"_extern_{path.stem}_{digest}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # dataclasses look their own module up by its name
    spec.loader.exec_module(module)
    if not hasattr(module, type_name):
        defined = ", ".join(name for name in vars(module) if not name.startswith("_"))
        raise ValueError(f"{file_path} defines no {type_name!r}; it defines {defined}")
    return getattr(module, type_name)

"""Loading what a config names: an object of a package, a user's function in a file, modules that register things."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE_PREFIX = "pkg://"  # before the name of a module, where a config takes the path of a Python file


def load_provider(provider: str) -> Any:
    """The object that ``module:name`` names: how optional packages are reached without importing them from here."""
    module_name, _, name = provider.partition(":")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"provider {provider!r} cannot be loaded: {error}; expected 'module:name'") from error


def load_extern_type(file_path: str | None, type_name: str | None) -> Any:
    """The object ``type_name`` of a Python file, or of a module as ``pkg://package.module``; None without a path.

    ValueError says what is missing.
    """
    if not file_path:
        return None
    if not type_name:
        raise ValueError(f"{file_path}: the name of the object to take from it is missing")
    if file_path.startswith(MODULE_PREFIX):
        try:
            module = importlib.import_module(file_path.removeprefix(MODULE_PREFIX))
        except ImportError as error:
            raise ValueError(f"{file_path} cannot be imported: {error}") from error
    else:
        module = _load_file(file_path)
    if not hasattr(module, type_name):
        defined = ", ".join(name for name in vars(module) if not name.startswith("_"))
        raise ValueError(f"{file_path} defines no {type_name!r}; it defines {defined}")
    return getattr(module, type_name)


def absolute_file(path: str) -> str:
    """The path for a process that works in another folder; a module stays as it is."""
    return path if path.startswith(MODULE_PREFIX) else str(Path(path).expanduser().absolute())


def import_external_libs(external_libs: str | Sequence[str] | None = None) -> None:
    """Import modules, or Python files (``*.py``), for what they register; each once in a process."""
    libraries = [external_libs] if isinstance(external_libs, str) else external_libs or []
    for library in libraries:
        if library.endswith(".py"):
            _load_file(library)
        else:
            importlib.import_module(library)


def _load_file(file_path: str) -> ModuleType:
    """The module of a Python file, which runs once in a process however often it is named, until it is edited."""
    path = Path(file_path).expanduser().absolute()
    if not path.is_file():
        raise ValueError(f"{file_path} does not exist; custom code is given as the path of a Python file")
    digest = hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:16]
    name = f"_extern_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script that is imported may end itself
        del sys.modules[name]
        raise ValueError(f"{file_path} cannot be imported: {type(error).__name__}: {error}") from error
    return module

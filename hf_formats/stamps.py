"""What a directory was made from: a stamp beside its files, so that nothing is made twice.

``.stamp.json`` holds the fields of ``made_from``, which name everything that decides the result, and ``outputs``, the
bytes of each file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hf_formats.files import write_json

STAMP_NAME = ".stamp.json"


def write_stamp(directory: Path, made_from: Mapping[str, Any], files: Iterable[Path] | None = None) -> None:
    """Declare ``directory`` complete with ``files``, by default all that it holds. Call it last."""
    listed = files_in(directory) if files is None else files
    outputs = {str(path.relative_to(directory)): path.stat().st_size for path in sorted(listed)}
    write_json(directory / STAMP_NAME, {**made_from, "outputs": outputs})


def read_stamp(directory: Path) -> dict[str, Any]:
    """The stamp of ``directory``; empty where there is none, or a damaged one, which proves nothing."""
    try:
        stamp = json.loads((directory / STAMP_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def is_made_from(directory: Path, made_from: Mapping[str, Any]) -> bool:
    """Whether its stamp says the same and every file that the stamp lists is there at its size."""
    stamp = read_stamp(directory)
    outputs = stamp.get("outputs")
    if not isinstance(outputs, dict) or any(stamp.get(key) != value for key, value in made_from.items()):
        return False
    files = {directory / name: size for name, size in outputs.items()}  # alone: they may stand among many others
    return all(file.is_file() and file.stat().st_size == size for file, size in files.items())


def files_in(path: Path) -> list[Path]:
    """The files below a folder in order, without its stamp; a file's path alone."""
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file() and file.name != STAMP_NAME)

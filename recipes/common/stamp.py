"""Finish-or-nothing outputs: atomic file writes, and a stamp that tells whether a stage's output is still current."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

STAMP_NAME = ".stamp.json"


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary neighbour of ``path``, sync it to disk, then rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp{os.getpid()}")
    try:
        write(temporary)
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text_atomically(path: Path, text: str) -> None:
    """``write_atomically`` for a UTF-8 text."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def digest_of(settings: Mapping[str, Any], inputs: Iterable[Path]) -> str:
    """Hex digest of a stage's settings and of its input files (content up to 64 MiB, size and time above that)."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for path in inputs:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and file.name != STAMP_NAME:
                digest.update(f"{file.name}:{_file_mark(file)}".encode())
    return digest.hexdigest()


def _file_mark(path: Path) -> str:
    status = path.stat()
    if status.st_size > 64 * 2**20:
        return f"{status.st_size}:{status.st_mtime_ns}"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_current(out_dir: Path, digest: str) -> bool:
    """Whether ``out_dir`` carries a stamp of this digest and every file that the stamp names still has its size."""
    stamp_path = out_dir / STAMP_NAME
    if not stamp_path.is_file():
        return False
    try:
        stamp = json.loads(stamp_path.read_text(encoding="utf-8"))
        files: dict[str, int] = stamp["files"]
        return stamp["digest"] == digest and all(
            (out_dir / name).is_file() and (out_dir / name).stat().st_size == size for name, size in files.items()
        )
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
        return False  # a damaged stamp proves nothing: do the stage again


def write_stamp(out_dir: Path, digest: str, files: Iterable[Path] | None = None) -> None:
    """Declare the output complete: name ``files`` (default: all below ``out_dir``) with their sizes. Call it last."""
    named = files if files is not None else (p for p in out_dir.rglob("*") if p.is_file() and p.name != STAMP_NAME)
    sizes = {str(path.relative_to(out_dir)): path.stat().st_size for path in sorted(named)}
    write_text_atomically(out_dir / STAMP_NAME, json.dumps({"digest": digest, "files": sizes}, indent=1) + "\n")

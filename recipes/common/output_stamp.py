"""Stamps of outputs: whether what a stage has written is complete, and made from these settings and inputs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from recipes.common.atomic_files import write_text_atomically

STAMP_NAME = ".stamp.json"


def digest_of(settings: Mapping[str, Any], inputs: Iterable[Path]) -> str:
    """Hex digest of a stage's settings and of its input files (content up to 64 MiB, size and time above that)."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for path in inputs:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and file.name != STAMP_NAME:
                digest.update(f"{file.name}:{_file_digest(file)}".encode())
    return digest.hexdigest()


def _file_digest(path: Path) -> str:
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


def write_stamp(out_dir: Path, digest: str, files: Iterable[Path]) -> None:
    """Declare the output complete: write ``files`` with their sizes and the digest. Call it last."""
    sizes = {str(path.relative_to(out_dir)): path.stat().st_size for path in sorted(files)}
    write_text_atomically(out_dir / STAMP_NAME, json.dumps({"digest": digest, "files": sizes}, indent=1) + "\n")

"""The manifest of a checkpoint directory: layout, sizes and digests, written last, so its presence means complete."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from hf_formats.files import write_json
from megatron.core.parallel_layout import ParallelLayout

MANIFEST = "manifest.json"
_FORMAT = 2
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class FileRecord:
    """Size and SHA-256 (hex) of one file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The layout that wrote a checkpoint, and every file of it by name."""

    layout: ParallelLayout
    files: Mapping[str, FileRecord]


def record_file(path: Path) -> FileRecord:
    """Size and digest of ``path`` as it is on disk."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return FileRecord(path.stat().st_size, digest.hexdigest())


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest, which marks ``directory`` as complete."""
    content = {"format": _FORMAT, "layout": asdict(manifest.layout)}
    write_json(directory / MANIFEST, content | {"files": {name: asdict(f) for name, f in manifest.files.items()}})


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint; ``ValueError`` naming the file when there is none or it cannot be read."""
    path = directory / MANIFEST
    try:
        content = json.loads(path.read_text())
        if content["format"] != _FORMAT:
            raise ValueError(f"{path} has format {content['format']}; this version reads format {_FORMAT}")
        layout = ParallelLayout.from_json(content["layout"])
        return Manifest(layout, {name: FileRecord(**record) for name, record in content["files"].items()})
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: {directory} is not a complete checkpoint") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error!r}): {directory} is not a complete checkpoint") from None


def file_problems(directory: Path, manifest: Manifest, verify_digests: bool = False) -> list[str]:
    """Every file of the manifest that is missing, of another size or (when asked) of another content."""
    found = []
    for name, record in manifest.files.items():
        path = directory / name
        try:
            num_bytes = path.stat().st_size if path.is_file() else None
        except FileNotFoundError:  # removed this moment
            num_bytes = None
        if num_bytes is None:
            found.append(f"{path} is missing")
        elif num_bytes != record.num_bytes:
            found.append(f"{path} has {num_bytes} bytes, expected {record.num_bytes}")
        elif verify_digests and record_file(path).sha256 != record.sha256:
            found.append(f"{path} is damaged: its SHA-256 differs from the manifest's")
    return found


def is_complete(directory: str | os.PathLike[str], verify_digests: bool = False) -> bool:
    """Whether ``directory`` holds a checkpoint with all its files at their sizes (and digests: reads everything)."""
    path = Path(directory)
    try:
        return not file_problems(path, read_manifest(path), verify_digests)
    except ValueError:
        return False

"""manifest.json of a converted checkpoint: from what it was made, and a checksum of every tensor of every file."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hf_formats.problems import shown_names
from megatron.core.dist_checkpointing.manifest import write_bytes
from mindspeed_llm.cli_io import MANIFEST_NAME
from mindspeed_llm.conversion.writer import FileRecord, TensorRecord

JOURNAL_NAME = "journal.jsonl"
_FORMAT = "weights-1"
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class WeightsManifest:
    """``made_from`` decides the output; ``beside`` are the files without tensors: path -> (bytes, CRC-32)."""

    kind: str
    made_from: Mapping[str, Any]
    files: Mapping[str, FileRecord]
    beside: Mapping[str, tuple[int, int]]


def write_manifest(directory: Path, kind: str, made_from: Mapping[str, Any], files: Mapping[str, FileRecord]) -> None:
    """Complete ``directory``, whose files are all there; what is not in ``files`` is read for its checksum."""
    paths = {str(path.relative_to(directory)): path for path in sorted(directory.rglob("*")) if path.is_file()}
    beside = {
        name: (path.stat().st_size, _file_crc32(path))
        for name, path in paths.items()
        if name not in files and name not in (JOURNAL_NAME, MANIFEST_NAME)
    }
    content = {"format": _FORMAT, "kind": kind, "made_from": made_from, "beside": beside}
    content["files"] = {file: record_to_json(files[file]) for file in sorted(files)}
    # Whoever finds the manifest takes the output as whole, so it appears whole.
    write_bytes(directory / MANIFEST_NAME, json.dumps(content, separators=(",", ":")).encode())


def read_manifest(directory: Path) -> WeightsManifest | None:
    """The manifest in ``directory``, None when there is none of this kind; ValueError when it cannot be read."""
    path = directory / MANIFEST_NAME
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.get("format") != _FORMAT:
            return None
        files = {file: record_from_json(record) for file, record in content["files"].items()}
        beside = {file: (size, crc) for file, (size, crc) in content["beside"].items()}
        return WeightsManifest(content["kind"], content["made_from"], files, beside)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read ({error!r}); convert again") from None


def is_whole(directory: Path, manifest: WeightsManifest) -> bool:
    """Whether every file is there at its size."""
    sizes = {file: record.num_bytes for file, record in manifest.files.items()}
    sizes |= {file: size for file, (size, _) in manifest.beside.items()}
    return all((directory / file).is_file() and (directory / file).stat().st_size == sizes[file] for file in sizes)


def damage(directory: Path, manifest: WeightsManifest, file: str, on_bytes: Callable[[int], None]) -> list[str]:
    """What is wrong with ``file``, with the tensors that are hit; reads all of it. ``on_bytes`` gets bytes read."""
    path = directory / file
    if file in manifest.beside:
        size, crc = manifest.beside[file]
        if not path.is_file():
            return [f"{file} is missing"]
        is_same = path.stat().st_size == size and _file_crc32(path) == crc
        return [] if is_same else [f"{file} is damaged or was changed: its checksum differs"]
    record = manifest.files[file]
    if not path.is_file():
        return [f"{file} is missing, with {shown_names(list(record.tensors))}"]
    size = path.stat().st_size
    problems = []
    if size != record.num_bytes:
        cut = [name for name, tensor in record.tensors.items() if tensor.offset + tensor.num_bytes > size]
        state = f"truncated, which cuts {shown_names(cut)}" if size < record.num_bytes else "longer than written"
        problems.append(f"{file} has {size} bytes instead of {record.num_bytes}: {state}")
    with path.open("rb") as stream:
        for name, tensor in record.tensors.items():
            if tensor.offset + tensor.num_bytes > size:
                continue
            if _crc32(stream, tensor.offset, tensor.num_bytes) != tensor.crc32:
                problems.append(f"{file}: {name} is damaged: its checksum differs")
            on_bytes(tensor.num_bytes)
        if size == record.num_bytes and rest_crc32(stream, record.num_bytes, record.tensors) != record.rest_crc32:
            problems.append(f"{file} is damaged between its tensors (header or directory)")
    return problems


def rest_crc32(stream: BinaryIO, num_bytes: int, tensors: Mapping[str, TensorRecord]) -> int:
    """CRC-32 of what lies between and around the tensors."""
    crc, position = 0, 0
    end = TensorRecord(num_bytes, 0, 0)
    for tensor in [*sorted(tensors.values(), key=lambda tensor: tensor.offset), end]:
        crc = _crc32(stream, position, tensor.offset - position, crc)
        position = tensor.offset + tensor.num_bytes
    return crc


def record_to_json(record: FileRecord) -> dict[str, Any]:
    """The record as it stands in journal and manifest."""
    tensors = {name: [tensor.offset, tensor.num_bytes, tensor.crc32] for name, tensor in record.tensors.items()}
    return {"num_bytes": record.num_bytes, "rest_crc32": record.rest_crc32, "tensors": tensors}


def record_from_json(content: Mapping[str, Any]) -> FileRecord:
    """The way back."""
    tensors = {name: TensorRecord(*fields) for name, fields in content["tensors"].items()}
    return FileRecord(content["num_bytes"], content["rest_crc32"], tensors)


def _crc32(stream: BinaryIO, offset: int, num_bytes: int, crc: int = 0) -> int:
    for chunk in _chunks(stream, offset, num_bytes):
        crc = zlib.crc32(chunk, crc)
    return crc


def _chunks(stream: BinaryIO, offset: int, num_bytes: int) -> Iterator[bytes]:
    while num_bytes:
        chunk = os.pread(stream.fileno(), min(num_bytes, _CHUNK_BYTES), offset)
        if not chunk:
            return
        yield chunk
        offset, num_bytes = offset + len(chunk), num_bytes - len(chunk)


def _file_crc32(path: Path) -> int:
    with path.open("rb") as stream:
        return _crc32(stream, 0, path.stat().st_size)

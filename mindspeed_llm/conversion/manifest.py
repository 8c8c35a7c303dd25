"""What a conversion has written: a journal line per finished file while it runs, manifest.json at the end.

Both say from what the output was made, and a checksum of every tensor; a run that was cut goes on by its journal.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from hf_formats.files import write_bytes
from hf_formats.problems import shown_names
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


@dataclass
class Journal:
    """The open journal of one unfinished output; ``records`` are the files that are finished and still there."""

    stream: FileIO
    records: dict[str, FileRecord] = field(default_factory=dict)

    def append(self, file: str, record: FileRecord) -> None:
        """Note that ``file`` is finished; durable when this returns."""
        self._write({"file": file, **record_to_json(record)})
        self.records[file] = record

    def _write(self, line: Mapping[str, Any]) -> None:
        left = memoryview(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        while left:
            left = left[self.stream.write(left) :]
        os.fsync(self.stream.fileno())


@contextmanager
def open_journal(directory: Path, made_from: Mapping[str, Any], resume: bool) -> Iterator[Journal]:
    """The journal in ``directory`` (made when absent), locked against a second run.

    ``made_from`` says what decides the output. ValueError when the directory is the unfinished output of something
    else, or when it is unfinished and ``resume`` is not given.
    """
    path = directory / JOURNAL_NAME
    if directory.exists() and any(directory.iterdir()) and not path.exists():
        raise ValueError(f"{directory} is in the way and was not left by a conversion; remove it")
    directory.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as stream:  # a line that a full disk refused must not be tried again at the end
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run is writing {directory}; wait for it or choose another output") from None
        journal = Journal(stream)
        lines = _read_lines(stream)
        if not lines:
            journal._write({"made_from": made_from})
        elif lines[0].get("made_from") != json.loads(json.dumps(made_from)):
            raise ValueError(
                f"{directory} is the unfinished output of other input or arguments; remove it, or give what it was "
                "started with"
            )
        elif not resume:
            raise ValueError(
                f"{directory} is an unfinished output with {len(lines) - 1} finished files; continue with --resume, or "
                "remove it"
            )
        for line in lines[1:]:
            file, record = line["file"], record_from_json(line)
            if _size(directory / file) == record.num_bytes:
                journal.records[file] = record
        yield journal


def _read_lines(stream: FileIO) -> list[dict[str, Any]]:
    """Complete lines; what a kill left of one behind them is cut off."""
    stream.seek(0)
    content = stream.read()
    end = content.rfind(b"\n") + 1
    if end != len(content):
        stream.truncate(end)
    return [json.loads(line) for line in content[:end].splitlines()]


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def record_to_json(record: FileRecord) -> dict[str, Any]:
    """The record as it stands in journal and manifest."""
    tensors = {name: [tensor.offset, tensor.num_bytes, tensor.crc32] for name, tensor in record.tensors.items()}
    return {"num_bytes": record.num_bytes, "rest_crc32": record.rest_crc32, "tensors": tensors}


def record_from_json(content: Mapping[str, Any]) -> FileRecord:
    tensors = {name: TensorRecord(*fields) for name, fields in content["tensors"].items()}
    return FileRecord(content["num_bytes"], content["rest_crc32"], tensors)


def _crc32(stream: BinaryIO, offset: int, num_bytes: int, crc: int = 0) -> int:
    while num_bytes and (chunk := os.pread(stream.fileno(), min(num_bytes, _CHUNK_BYTES), offset)):
        crc = zlib.crc32(chunk, crc)
        offset, num_bytes = offset + len(chunk), num_bytes - len(chunk)
    return crc


def _file_crc32(path: Path) -> int:
    with path.open("rb") as stream:
        return _crc32(stream, 0, path.stat().st_size)

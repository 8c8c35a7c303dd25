"""What a run has finished, one durable line per file, so that a run that was cut goes on where it stopped."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from mindspeed_llm.conversion.manifest import JOURNAL_NAME, record_from_json, record_to_json
from mindspeed_llm.conversion.writer import FileRecord


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

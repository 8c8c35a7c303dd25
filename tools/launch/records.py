"""What earlier starts in OUTPUT_DIR have made, so that a start need not even load what would find it complete."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from hf_formats.files import write_json
from recipes.common.recipe import ROOT

FILE = ".made.json"
_CODE = (".py", ".json", ".yaml", ".toml", ".c", ".cpp", ".h")


class Records:
    """``OUTPUT_DIR/.made.json``: what was made under a name, and the digest of everything that it was made from.

    A record that is damaged, or of other code, is none: the work is then done, or found complete by its own command.
    """

    def __init__(self, output_dir: Path) -> None:
        self._path = output_dir / FILE

    @cached_property
    def code(self) -> str:
        """The digest of the repository's code."""
        return code_digest(ROOT)

    def find(self, name: str, *made_from: object) -> Any:
        """What ``name`` was made to be from this and by this code; None where there is no such record."""
        record = self._read().get(name)
        if not isinstance(record, dict) or record.get("digest") != self._digest(made_from):
            return None
        return record.get("made")

    def write(self, name: str, made: Any, *made_from: object) -> None:
        """Replace the record of ``name``; ``made`` must be JSON and not None."""
        records = {**self._read(), name: {"digest": self._digest(made_from), "made": made}}
        write_json(self._path, records)

    def _digest(self, made_from: Sequence[object]) -> str:
        return hashlib.sha256(json.dumps([self.code, *made_from], default=str).encode()).hexdigest()

    def _read(self) -> dict[str, Any]:
        try:
            records = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return records if isinstance(records, dict) else {}


def files_of(command: Sequence[str]) -> list[tuple[str, int, int]]:
    """Path, size and time of every file that a command names, or that is in a folder which it names."""
    named = sorted({Path(argument) for argument in command if os.path.isabs(argument)})
    return [
        (str(file), status.st_size, status.st_mtime_ns)
        for path in named
        for file in (sorted(path.rglob("*")) if path.is_dir() else [path])
        if file.is_file() and (status := file.stat())
    ]


def code_digest(root: Path) -> str:
    """The digest of what the repository's packages are, without its tests."""
    digest = hashlib.sha256()
    for path in _code_files(root):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _code_files(root: Path) -> Iterator[Path]:
    packages = (package.parent for package in sorted(root.glob("*/__init__.py")) if package.parent.name != "tests")
    for package in packages:
        for folder, folders, names in os.walk(package):
            folders.sort()
            yield from (Path(folder) / name for name in sorted(names) if name.endswith(_CODE))

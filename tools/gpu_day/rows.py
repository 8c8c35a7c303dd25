"""The rows that the parts of a GPU day find out: kept one by one, so that a part that is cut off loses none."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One thing that was found out.

    figure, unit: what was measured · bar: the least figure that is wanted · note: what else it is worth knowing, or
    what is wrong · is_well: whether it is as wanted; None where nothing is wanted, or the scale is not a GPU's.
    """

    part: str
    name: str
    figure: float | None = None
    unit: str = ""
    bar: float | None = None
    note: str = ""
    is_well: bool | None = None


class Rows:
    """The rows of one part, in a JSON file that is whole after every row."""

    def __init__(self, path: Path, part: str, judges: bool) -> None:
        """judges: whether figures are compared with their bars."""
        self._path, self._part, self._judges = path, part, judges
        self.rows: list[Row] = []
        self._save()

    def holds(self, name: str, is_well: bool, note: str = "") -> None:
        """Add something that must be so."""
        self._add(Row(self._part, name, note=note, is_well=is_well))

    def measured(self, name: str, figure: float, unit: str, bar: float | None = None, note: str = "") -> None:
        """Add a figure, which must reach its ``bar`` on a GPU."""
        is_well = None if bar is None or not self._judges else figure >= bar
        self._add(Row(self._part, name, figure, unit, bar, note, is_well))

    def _add(self, row: Row) -> None:
        print(line(row), flush=True)
        self.rows.append(row)
        self._save()

    def _save(self) -> None:
        save_json(self._path, [asdict(row) for row in self.rows])


def read_rows(path: Path) -> list[Row]:
    """The rows of a part's file; none where the part never began."""
    return [Row(**row) for row in json.loads(path.read_text("utf-8"))] if path.is_file() else []


def save_json(path: Path, content: object) -> None:
    save_text(path, json.dumps(content, indent=1))


def save_text(path: Path, text: str) -> None:
    """Write a file that is never half there."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def line(row: Row) -> str:
    """A row for a terminal."""
    return f"{_VERDICTS[row.is_well]:<5} {row.part}: {row.name}: {', '.join(filter(None, (_figure(row), row.note)))}"


def page(rows: Sequence[Row], facts: Sequence[str]) -> str:
    """The page for people: what ran where, then a table."""
    lines = [
        "# A GPU day",
        "",
        *(f"- {fact}" for fact in facts),
        "",
        "| part | what | figure | | note |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        note = row.note.replace("|", "/").replace("\n", " ")
        lines.append(f"| {row.part} | {row.name} | {_figure(row)} | {_VERDICTS[row.is_well]} | {note} |")
    return "\n".join(lines) + "\n"


_VERDICTS = {True: "well", False: "WRONG", None: ""}


def _figure(row: Row) -> str:
    if row.figure is None:
        return ""
    wanted = "" if row.bar is None else f" (wanted: {row.bar:g})"
    return f"{row.figure:.4g} {row.unit}{wanted}"

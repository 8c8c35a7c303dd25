"""The rows that the parts of a GPU day find out: kept one by one, so that a part that is cut off loses none."""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hf_formats.files import write_json

NOT_STARTED, CUT_OFF, ENDED = "not started", "cut off", "ended"  # names of rows about a part
ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Row:
    """One thing that was found out.

    figure, unit: what was measured · bar, most: the least and the greatest figure that is wanted · note: what else is
    worth knowing, or what is wrong · is_well: whether it is as wanted; None where nothing is wanted, or the scale is
    not a GPU's.
    """

    part: str
    name: str
    figure: float | None = None
    unit: str = ""
    bar: float | None = None
    note: str = ""
    is_well: bool | None = None
    most: float | None = None

    @property
    def has_bar(self) -> bool:
        """Whether it is a figure with a bar, which is judged on a GPU alone."""
        return self.bar is not None or self.most is not None

    @property
    def is_unfinished(self) -> bool:
        """Whether a part tells by this row that it did not come to its end."""
        return self.name in (NOT_STARTED, CUT_OFF)


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

    def measured(
        self, name: str, figure: float, unit: str, bar: float | None = None, note: str = "", most: float | None = None
    ) -> None:
        """Add a figure, which must be at least ``bar`` and at most ``most`` on a GPU."""
        row = Row(self._part, name, figure, unit, bar, note, most=most)
        is_well = (bar is None or figure >= bar) and (most is None or figure <= most)
        self._add(replace(row, is_well=is_well if self._judges and row.has_bar else None))

    def _add(self, row: Row) -> None:
        print(line(row), flush=True)
        self.rows.append(row)
        self._save()

    def _save(self) -> None:
        write_json(self._path, [asdict(row) for row in self.rows])


def described(error: BaseException) -> str:
    """An error, and the last line of this repository that led to it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(f"{ROOT}/")]
    place = f" at {frames[-1].filename.removeprefix(f'{ROOT}/')}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {str(error)[:300]}{place}"


def read_rows(path: Path) -> list[Row]:
    """The rows of a part's file; none where the part never began."""
    return [Row(**row) for row in json.loads(path.read_text("utf-8"))] if path.is_file() else []


def line(row: Row) -> str:
    """A row for a terminal."""
    return f"{_VERDICTS[row.is_well]:<5} {row.part}: {row.name}: {', '.join(filter(None, (_figure(row), row.note)))}"


def page(rows: Sequence[Row], facts: Sequence[str]) -> str:
    """The page for people: what ran where, what came out in a sentence, what is wrong, then everything."""
    wrong = [row for row in rows if row.is_well is False]
    sections = [("Not as wanted", wrong)] if wrong else []
    lines = ["# A GPU day", "", *(f"- {fact}" for fact in facts), "", f"**{summary(rows)}**", ""]
    for title, listed in [*sections, ("Everything", rows)]:
        lines += [f"## {title}", "", "| part | what | figure | | note |", "|---|---|---|---|---|"]
        for row in listed:
            note = row.note.replace("|", "/").replace("\n", " ")
            lines.append(f"| {row.part} | {row.name} | {_figure(row)} | {_VERDICTS[row.is_well]} | {note} |")
        lines.append("")
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> str:
    """One line: bars that are met of those that are judged, what holds of what must hold, parts without an end."""
    judged = [row for row in rows if row.is_well is not None]
    words = []
    for name, of in (("bars met", True), ("things as they must be", False)):
        found = [row.is_well for row in judged if row.has_bar is of]
        words.append(f"{sum(map(bool, found))} of {len(found)} {name}")
    unjudged = sum(row.has_bar and row.is_well is None for row in rows)
    words += [f"{unjudged} bars not judged"] if unjudged else []
    unfinished = [f"{row.part} ({row.name})" for row in rows if row.is_unfinished]
    words += [f"not finished: {', '.join(unfinished)}"] if unfinished else []
    return "; ".join(words) + "."


_VERDICTS = {True: "well", False: "WRONG", None: ""}


def _figure(row: Row) -> str:
    if row.figure is None:
        return ""
    limits = [f"at least {row.bar:g}"] if row.bar is not None else []
    limits += [f"at most {row.most:g}"] if row.most is not None else []
    wanted = f" (wanted: {', '.join(limits)})" if limits else ""
    return f"{row.figure:.4g} {row.unit}{wanted}"

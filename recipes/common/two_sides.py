"""A folder of questions with a train and a test side (parquet or JSON lines) to verl's train and test parquet."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from hf_formats.stamps import is_made_from, write_stamp
from recipes.common import data_scripts
from recipes.common.options import INPUT, DataScriptParser, user_path

SIDES = ("train", "test")
OUTPUTS = tuple(f"{side}.parquet" for side in SIDES)


@dataclass(frozen=True)
class QuestionForm:
    """What a recipe makes of such a folder.

    name: of the data set, for messages · columns: sets of columns, of which a file has one · converted_row: from a row,
    its side and its place there to verl's schema, or the reason why it cannot be used · settings: what else the rows
    depend on; output made with other settings is stale · carried, extra_texts: text columns of the output, and texts of
    its extra_info · published: of each side, how the names of its published files begin, where that is not its own.
    """

    name: str
    columns: tuple[tuple[str, str], ...]
    converted_row: Callable[[Any, str, int], dict[str, Any] | str]
    settings: Mapping[str, Any]
    carried: Sequence[str] = ()
    extra_texts: Sequence[str] = ()
    published: Mapping[str, str] = field(default_factory=dict)

    def input_files(self, input_dir: Path) -> dict[str, list[Path]]:
        """Files of each side, .parquet or .jsonl, in the folder or its ``data``; sorted.

        They are named as published; where none are, ``train*`` or ``*_train*``. Files that this command wrote are not
        among them, so that ``--output_dir`` may be the same folder. ValueError when the folder or a side is not there.
        """
        names = {side: self.published.get(side, side) for side in SIDES}
        every = " and ".join(f"{name}*.parquet" for name in names.values())
        expected = f"expected a folder with {every} (or .jsonl) of {self.name}"
        if not input_dir.is_dir():
            raise ValueError(f"--input_dir {input_dir}: no such folder; {expected}")
        found = {}
        for side, name in names.items():
            starts = [(name,)] * (name != side) + [(side, f"*_{side}")]
            inputs = [_inputs(folder, start) for start in starts for folder in (input_dir, input_dir / "data")]
            found[side] = next(filter(None, inputs), [])
            if not found[side]:
                raise ValueError(f"--input_dir {input_dir}: no {name}*.parquet and no {name}*.jsonl there; {expected}")
        return found

    def source_rows(self, file: Path) -> Iterator[Any]:
        """Every row of a file; ValueError when it is no parquet or JSON lines file, or lacks a column."""
        if file.suffix == ".jsonl":
            for position, line in enumerate(line for line in data_scripts.text_lines(file) if line.strip()):
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{file}: row {position} is no JSON object ({error})") from error
            return
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table = pq.read_table(file)
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{file} is not a readable parquet file: {str(error).splitlines()[0]}") from error
        if not any(set(columns) <= set(table.column_names) for columns in self.columns):
            expected = " or ".join(" and ".join(columns) for columns in self.columns)
            raise ValueError(f"{file} has the columns {', '.join(table.column_names)}; expected {expected}")
        for batch in table.to_batches():  # not all at once: a published file may have millions of rows
            yield from batch.to_pylist()

    def convert(self, input_dir: Path, local_dir: Path) -> dict[str, int] | None:
        """Write both parquet files; return the rows of each side, or None when they are there, of these inputs.

        Nothing is written unless every row of both sides can be used.
        """
        files = self.input_files(input_dir)
        outputs = {side: local_dir / f"{side}.parquet" for side in SIDES}
        own = [str(path) for side in SIDES for path in files[side] if path.resolve() == outputs[side].resolve()]
        if own:
            raise ValueError(f"--output_dir {local_dir}: {' and '.join(own)} would be replaced; choose another folder")
        made_from = {"digest": data_scripts.digest_of(self.settings, chain.from_iterable(files.values()))}
        if is_made_from(local_dir, made_from):
            return None
        rows = {side: self.side_rows(side, files[side]) for side in SIDES}
        for side in SIDES:
            data_scripts.write_parquet(rows[side], outputs[side], self.carried, self.extra_texts)
        write_stamp(local_dir, made_from, outputs.values())
        return {side: len(rows[side]) for side in SIDES}

    def side_rows(self, side: str, files: Sequence[Path]) -> list[dict[str, Any]]:
        """The converted rows of a side's files; ValueError that names every row that cannot be used."""
        sources = ((f"{file}: row {i}", row) for file in files for i, row in enumerate(self.source_rows(file)))
        found = ((where, self.converted_row(row, side, index)) for index, (where, row) in enumerate(sources))
        return data_scripts.usable_rows(found, ", ".join(map(str, files)))

    def main(self, description: str | None, default_dir: str, argv: list[str] | None = None) -> int:
        """Command line; returns the exit status, 2 for an input that a user can mend."""
        parser = DataScriptParser(description)
        parser.add_argument(*INPUT, type=user_path, required=True, help=f"folder of {self.name}")
        parser.add_output("where the parquet files go", default_dir)
        args = parser.parse_args(argv)
        return data_scripts.run_data_script(lambda: self.report(args.input_dir, args.output_dir), args.output_dir)

    def report(self, input_dir: Path, local_dir: Path) -> list[str] | None:
        """``convert``, and what it has written as lines for a person; None when there was nothing to do."""
        counts = self.convert(input_dir, local_dir)
        if counts is None:
            return None
        sides = f"train.parquet ({counts['train']} rows) and test.parquet ({counts['test']})"
        return [f"wrote {sides} to {local_dir}"]


def _inputs(folder: Path, starts: Sequence[str]) -> list[Path]:
    """Files whose names begin so, without this command's own; sorted."""
    found = {path for start in starts for kind in ("parquet", "jsonl") for path in folder.glob(f"{start}*.{kind}")}
    return [path for path in sorted(found) if not _is_output(path)]


def _is_output(path: Path) -> bool:
    """Whether a file has the name and the columns that this command writes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return path.name in OUTPUTS and {"data_source", "reward_model"} <= set(pq.read_schema(path).names)
    except (pa.ArrowInvalid, OSError):
        return False  # not a parquet file: reading it reports that

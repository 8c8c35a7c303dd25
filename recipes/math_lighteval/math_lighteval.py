"""From MATH-lighteval (problem, level, type, solution; parquet or JSON lines) to verl's train and test parquet.

GSM8K's rows (question, answer ending in ``#### n``) are read as well.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

if not __package__:  # run by its path: the repository's packages must be found
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.common import data_scripts
from recipes.common.math_answers import true_answer

DATA_SOURCE = "DigitalLearningGmbH/MATH-lighteval"
INSTRUCTION = " Let's think step by step and output the final answer within \\boxed{}."
SIDES = ("train", "test")
GSM8K = "openai/gsm8k"
# data source -> its columns of the problem and of the worked solution; the first one that fits a row applies
FORMS = {DATA_SOURCE: ("problem", "solution"), GSM8K: ("question", "answer")}
CARRIED = ("level", "type")  # where a row has them
FORM_VERSION = 1  # raise when the rows would come out differently from the same input


def input_files(input_dir: Path) -> dict[str, list[Path]]:
    """The files of each side: ``train*`` or ``*_train*``, .parquet or .jsonl, in the folder or its ``data``; sorted.

    Files that this command wrote are not among them, so that ``--local_dir`` may be the same folder. ValueError when
    the folder or a side is not there.
    """
    expected = "expected a folder with train*.parquet and test*.parquet (or .jsonl) of MATH-lighteval"
    if not input_dir.is_dir():
        raise ValueError(f"--input_dir {input_dir}: no such folder; {expected}")
    found = {}
    for side in SIDES:
        patterns = [f"{start}{side}*.{kind}" for kind in ("parquet", "jsonl") for start in ("", "*_")]
        folders = [{path for name in patterns for path in input_dir.glob(inner + name)} for inner in ("", "data/")]
        inputs = [[path for path in sorted(folder) if not _is_output(path)] for folder in folders]
        found[side] = inputs[0] or inputs[1]
        if not found[side]:
            raise ValueError(f"--input_dir {input_dir}: no {side}*.parquet and no {side}*.jsonl there; {expected}")
    return found


def _is_output(path: Path) -> bool:
    """Whether a file has the columns that this command writes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return path.suffix == ".parquet" and {"data_source", "reward_model"} <= set(pq.read_schema(path).names)
    except (pa.ArrowInvalid, OSError):
        return False  # not a parquet file: reading it reports that


def source_rows(file: Path) -> Iterator[Any]:
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
    if not any(set(columns) <= set(table.column_names) for columns in FORMS.values()):
        expected = " or ".join(" and ".join(columns) for columns in FORMS.values())
        raise ValueError(f"{file} has the columns {', '.join(table.column_names)}; expected {expected}")
    yield from table.to_pylist()


def converted_row(row: Any, side: str, index: int) -> dict[str, Any] | str:
    """The row in verl's schema, ``index`` its place in its side; or the reason why it cannot be used."""
    if not isinstance(row, dict):
        return f"is a {type(row).__name__}, not an object with problem and solution"
    data_source = GSM8K if FORMS[GSM8K][0] in row else DATA_SOURCE
    problem, solution = FORMS[data_source]
    for name in (problem, solution):
        if not isinstance(row.get(name), str) or not row[name].strip():
            return f"{name} is {'missing' if name not in row else 'empty or no text'}"
    answer = true_answer(row[solution])
    if answer is None:
        return f"its {solution} has no final answer: expected a \\boxed{{...}} that is closed and not empty, or ####"
    carried = {name: None if row.get(name) is None else str(row[name]) for name in CARRIED}
    prompt = [{"role": "user", "content": row[problem] + INSTRUCTION}]
    return data_scripts.verl_row(data_source, prompt, answer, side, index) | carried


def convert(input_dir: Path, local_dir: Path) -> dict[str, int] | None:
    """Write both parquet files; return the rows of each side, or None when they are there and their inputs unchanged.

    Nothing is written unless every row of both sides can be used.
    """
    files = input_files(input_dir)
    outputs = {side: local_dir / f"{side}.parquet" for side in SIDES}
    own = [str(path) for side in SIDES for path in files[side] if path.resolve() == outputs[side].resolve()]
    if own:
        raise ValueError(f"--local_dir {local_dir}: {' and '.join(own)} would be replaced; choose another folder")
    digest = data_scripts.digest_of(
        {"form": FORM_VERSION, "instruction": INSTRUCTION}, chain.from_iterable(files.values())
    )
    if data_scripts.is_current(local_dir, digest):
        return None
    rows = {}
    for side in SIDES:
        sources = ((f"{file}: row {i}", row) for file in files[side] for i, row in enumerate(source_rows(file)))
        found = ((where, converted_row(row, side, index)) for index, (where, row) in enumerate(sources))
        rows[side] = data_scripts.usable_rows(found, ", ".join(map(str, files[side])))
    for side in SIDES:
        data_scripts.write_parquet(rows[side], outputs[side], columns=CARRIED)
    data_scripts.write_stamp(local_dir, digest, outputs.values())
    return {side: len(rows[side]) for side in SIDES}


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status, 2 for an input that a user can mend."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input_dir", type=Path, required=True, help="folder of MATH-lighteval")
    parser.add_argument("--local_dir", type=Path, default=Path("~/data/math"), help="where the parquet files go")
    args = parser.parse_args(argv)
    local_dir = args.local_dir.expanduser()

    def run() -> list[str] | None:
        counts = convert(args.input_dir.expanduser(), local_dir)
        if counts is None:
            return None
        return [f"wrote train.parquet ({counts['train']} rows) and test.parquet ({counts['test']}) to {local_dir}"]

    return data_scripts.run_data_script(run, local_dir)


if __name__ == "__main__":
    sys.exit(main())

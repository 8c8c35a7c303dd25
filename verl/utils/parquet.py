"""The row schema of verl's RL parquet files, and files that do not have it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def schema_problems(path: str, prompt_key: str = "prompt") -> list[str]:
    """Everything that keeps ``path`` from being a file of prompts, one sentence each; reads the footer only."""
    file = Path(path).expanduser()
    if not file.is_file():
        return [f"{path} does not exist; make it with a recipe's data script (recipes/README.md)"]
    try:
        metadata = pq.read_metadata(file)
        schema = metadata.schema.to_arrow_schema()
    except (pa.ArrowInvalid, OSError) as error:
        return [f"{path} is not a readable parquet file: {str(error).splitlines()[0]}"]
    expected = (
        ("data_source", "a string", _is_text),
        (prompt_key, "a list of {role, content}", _is_chat),
        ("reward_model", "a struct with ground_truth", lambda kind: _has_fields(kind, "ground_truth")),
    )
    problems = []
    for name, what, matches in expected:
        index = schema.get_field_index(name)
        if index < 0:
            problems.append(f"{path} has no column {name!r} ({what}); it has {', '.join(schema.names)}")
        elif not matches(schema.field(index).type):
            problems.append(f"{path}: column {name!r} is {schema.field(index).type}; expected {what}")
    if not metadata.num_rows:
        problems.append(f"{path} has no rows")
    return problems


def data_sources(paths: Sequence[str]) -> set[str]:
    columns = (pq.read_table(Path(path).expanduser(), columns=["data_source"]).column(0) for path in paths)
    return {str(source) for column in columns for source in column.unique().to_pylist()}


def read_rows(paths: Sequence[str], prompt_key: str) -> list[dict[str, Any]]:
    """All rows of all files, in order, their messages as they were written; ValueError with every schema problem."""
    problems = [problem for path in paths for problem in schema_problems(path, prompt_key)]
    if problems:
        raise ValueError("\n".join(problems))
    rows = [row for path in paths for row in pq.read_table(Path(path).expanduser()).to_pylist()]
    for row in rows:
        row[prompt_key] = [chat_message(message) for message in row[prompt_key] or []]
    return rows


def first_prompts(path: str, prompt_key: str, count: int) -> list[list[dict[str, Any]]]:
    """The chats of at most ``count`` rows at the beginning of a file whose schema is right."""
    with pq.ParquetFile(Path(path).expanduser()) as file:
        rows = next(file.iter_batches(count, columns=[prompt_key])).to_pylist()
    return [[chat_message(message) for message in row[prompt_key] or []] for row in rows]


def chat_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message without the nulls that Arrow adds, which has every key of a column in each of its messages.

    A null that somebody wrote looks the same, so it goes too, at every depth; templates take an absent key and null
    alike. ``content`` stays: a message without one, a call of a tool, has it as null, which templates ask for.
    """
    return {"role": message["role"], "content": None} | _without_nulls(message)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(of) for key, of in value.items() if of is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _is_text(kind: pa.DataType) -> bool:
    value = kind.value_type if pa.types.is_dictionary(kind) else kind  # pandas writes categories as dictionaries
    return pa.types.is_string(value) or pa.types.is_large_string(value)


def _is_chat(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return is_list and _has_fields(kind.value_type, "role", "content")


def _has_fields(kind: pa.DataType, *names: str) -> bool:
    return pa.types.is_struct(kind) and all(kind.get_field_index(name) >= 0 for name in names)

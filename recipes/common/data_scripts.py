"""The parts that the recipes' data scripts share: rows as parquet, the message for bad rows, stamps, the command."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_formats.files import write_atomically
from hf_formats.stamps import files_in

MAX_REPORTED = 10


def run_data_script(convert: Callable[[], Sequence[str] | None], output_dir: Path) -> int:
    """Run ``convert`` and print the lines that it returns, None for an output that is complete and current.

    Returns the exit status, 2 for an input that a user can mend.
    """
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, markup=False)
    try:
        lines = convert()
    except (ValueError, OSError) as error:
        console.print(f"error: {error}", style="red")
        return 2
    for line in [f"{output_dir}: complete and its input unchanged, nothing to do"] if lines is None else lines:
        console.print(line)
    return 0


def verl_row(source: str, prompt: Sequence[Mapping[str, str]], answer: str, split: str, index: int) -> dict[str, Any]:
    """A row in verl's schema with a rule reward."""
    return {
        "data_source": source,
        "prompt": prompt,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index},
    }


def messages(prompt: Any) -> list[dict[str, str]] | None:
    """The messages of a prompt, each with role and content alone; None when it is no list of such, none empty."""
    keys = ("role", "content")

    def is_message(found: Any) -> bool:
        return isinstance(found, dict) and all(isinstance(found.get(key), str) and found[key].strip() for key in keys)

    if not isinstance(prompt, list) or not prompt or not all(map(is_message, prompt)):
        return None
    return [{key: message[key] for key in keys} for message in prompt]


def usable_rows(rows: Iterable[tuple[str, dict[str, Any] | str]], where: object) -> list[dict[str, Any]]:
    """The rows; each comes with where it stands, and is a text if it cannot be used: the reason.

    Raises:
        ValueError: the first reasons, one a line; or ``where`` has no rows.
    """
    usable: list[dict[str, Any]] = []
    problems: list[str] = []
    for position, row in rows:
        if isinstance(row, str):
            problems.append(f"{position}: {row}")
        else:
            usable.append(row)
    if len(problems) > MAX_REPORTED:
        problems[MAX_REPORTED:] = [f"and {len(problems) - MAX_REPORTED} more"]
    if problems or not usable:
        raise ValueError("\n".join(problems) or f"{where}: no rows")
    return usable


def text_lines(file: Path) -> list[str]:
    """The lines of a UTF-8 file, with a byte-order mark or not, cut at line feeds alone; ValueError when it is none."""
    try:
        return file.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not a UTF-8 text: {error}") from error


def write_parquet(
    rows: list[dict[str, Any]], path: Path, columns: Sequence[str] = (), extra_texts: Sequence[str] = ()
) -> None:
    """Write verl's rows with a fixed schema, atomically: also text ``columns``, and ``extra_texts`` in extra_info."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = pa.string()
    extra_info = [("split", text), ("index", pa.int64()), *((name, text) for name in extra_texts)]
    schema = pa.schema(
        [
            ("data_source", text),
            ("prompt", pa.list_(pa.struct([("role", text), ("content", text)]))),
            ("ability", text),
            ("reward_model", pa.struct([("style", text), ("ground_truth", text)])),
            ("extra_info", pa.struct(extra_info)),
            *((name, text) for name in columns),
        ]
    )
    table = pa.Table.from_pylist(rows, schema=schema)
    write_atomically(path, lambda temporary: pq.write_table(table, temporary))


def digest_of(settings: Mapping[str, Any], inputs: Iterable[Path]) -> str:
    """Hex digest of a stage's settings and of the content of its input files, which may be copied or fetched again."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for path in inputs:
        for file in files_in(path):
            with file.open("rb") as stream:
                content = hashlib.file_digest(stream, "sha256").hexdigest()
            digest.update(f"{file.name}:{content}".encode())
    return digest.hexdigest()

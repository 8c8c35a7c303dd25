"""The parts that the recipes' data scripts share: verl's rows as parquet, one message for all bad rows, the command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from recipes.common.atomic_files import write_atomically

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
    if lines is None:
        lines = [f"{output_dir}: complete and its input unchanged, nothing to do"]
    for line in lines:
        console.print(line)
    return 0


def check_rows(rows: Sequence[Any], problems: Sequence[str], where: str) -> None:
    """ValueError with the first problems, one a line, or saying that ``where`` has no rows."""
    if not rows and not problems:
        raise ValueError(f"{where}: no rows")
    if problems:
        more = [f"and {len(problems) - MAX_REPORTED} more"] if len(problems) > MAX_REPORTED else []
        raise ValueError("\n".join([*problems[:MAX_REPORTED], *more]))


def write_parquet(
    rows: list[dict[str, Any]],
    path: Path,
    text_columns: Sequence[str] = (),
    reward_fields: Sequence[str] = ("style", "ground_truth"),
    extra_texts: Sequence[str] = (),
) -> None:
    """Write verl's rows with a fixed schema, atomically.

    Args:
        text_columns: columns behind verl's own.
        reward_fields: the order of the fields of ``reward_model``.
        extra_texts: fields of ``extra_info`` behind split and index.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = pa.string()
    extra_info = [("split", text), ("index", pa.int64()), *((name, text) for name in extra_texts)]
    schema = pa.schema(
        [
            ("data_source", text),
            ("prompt", pa.list_(pa.struct([("role", text), ("content", text)]))),
            ("ability", text),
            ("reward_model", pa.struct([(name, text) for name in reward_fields])),
            ("extra_info", pa.struct(extra_info)),
            *((name, text) for name in text_columns),
        ]
    )
    table = pa.Table.from_pylist(rows, schema=schema)
    write_atomically(path, lambda temporary: pq.write_table(table, temporary))

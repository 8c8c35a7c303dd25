"""What data scripts of recipes share: verl's rows as parquet, and one message for all rows that cannot be used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.common.stamp import write_atomically

MOST_TOLD = 10


def check_rows(rows: Sequence[Any], problems: Sequence[str], where: str) -> None:
    """ValueError with the first problems, one a line, or saying that ``where`` has no rows."""
    if not rows and not problems:
        raise ValueError(f"{where}: no rows")
    if problems:
        more = [f"and {len(problems) - MOST_TOLD} more"] if len(problems) > MOST_TOLD else []
        raise ValueError("\n".join([*problems[:MOST_TOLD], *more]))


def write_parquet(rows: list[dict[str, Any]], path: Path, text_columns: Sequence[str] = ()) -> None:
    """Write verl rows with a fixed schema, ``text_columns`` behind verl's own, atomically."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = pa.string()
    schema = pa.schema(
        [
            ("data_source", text),
            ("prompt", pa.list_(pa.struct([("role", text), ("content", text)]))),
            ("ability", text),
            ("reward_model", pa.struct([("style", text), ("ground_truth", text)])),
            ("extra_info", pa.struct([("split", text), ("index", pa.int64())])),
            *((name, text) for name in text_columns),
        ]
    )
    table = pa.Table.from_pylist(rows, schema=schema)
    write_atomically(path, lambda temporary: pq.write_table(table, temporary))

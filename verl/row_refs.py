"""References to rows that stay on the workers that made them (remote columns)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

BATCH, RANK, SLOT = range(3)  # what the numbers of a reference mean


@dataclass(frozen=True, eq=False)
class RowRefs:
    """The remote columns of a batch of B rows: where each row of each column is.

    Attributes:
        columns: name -> int32 [B, 3]: the number of the generated batch, the rank that owns the row, its slot there.
            Columns may differ: log-probs are owned by ranks that trained, tokens by ranks that generated.
    """

    columns: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return next((len(places) for places in self.columns.values()), 0)

    def __contains__(self, column: str) -> bool:
        return column in self.columns

    @property
    def num_bytes(self) -> int:
        return sum(places.nbytes for places in self.columns.values())

    def rows(self, chosen: Any) -> RowRefs:
        return RowRefs({name: places[chosen] for name, places in self.columns.items()})

    def union(self, other: RowRefs) -> RowRefs:
        """The columns of both; ValueError when a column has two different references."""
        conflicts = [
            name
            for name, places in other.columns.items()
            if name in self.columns and not np.array_equal(self.columns[name], places)
        ]
        if conflicts:
            raise ValueError(f"union: row_refs has different references for {conflicts}")
        return RowRefs({**self.columns, **other.columns})

    @staticmethod
    def concat(parts: Sequence[RowRefs]) -> RowRefs:
        return RowRefs({name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns})

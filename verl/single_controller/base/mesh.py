"""Which part of a batch each rank of a group takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    """The part of a batch that each rank takes, and whether the rank returns it: one entry per rank."""

    dp_ranks: tuple[int, ...]
    is_collect: tuple[bool, ...]

    @property
    def dp_size(self) -> int:
        return max(self.dp_ranks) + 1

    def problems(self) -> list[str]:
        """Returns the parts that do not have exactly one collecting rank."""
        found = []
        for dp in range(self.dp_size):
            ranks = [rank for rank, part in enumerate(self.dp_ranks) if part == dp and self.is_collect[rank]]
            if len(ranks) != 1:
                found.append(f"dp rank {dp} is collected from ranks {ranks}, expected exactly one")
        return found

"""The rows of a planned rank: kept like those of a run, and asked for by nobody."""

from __future__ import annotations

import torch.distributed as dist

from verl.workers.kept_rows import KeptRows


class PlannedRows(KeptRows):
    """Without the server: there is no other rank that could ask, or be asked."""

    def _open(self, group: dist.ProcessGroup) -> None:
        self._addresses = []

    def close(self) -> None:
        """There is nothing to end."""

"""The rows of a planned rank: stored like those of a run, and fetched by nobody."""

from __future__ import annotations

import torch.distributed as dist

from verl.workers.row_store import RowStore


class PlannedRowStore(RowStore):
    """A row store without the server: there is no other rank."""

    def open_server(self, group: dist.ProcessGroup) -> None:
        self._addresses = []

    def close(self) -> None:
        """Does nothing: there is no server."""

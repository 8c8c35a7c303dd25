"""A new file that goes to disk while it grows, so that the last sync is short and writing seldom waits for the disk."""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_SYNC_BYTES = 64 << 20


class SyncedFile(io.BufferedRandom):
    """Opened for writing and reading; a thread syncs it each time that another 64 MiB were written.

    The thread waits for more bytes or for the end, and is unblocked by ``write``, ``sync`` and the end of the ``with``
    block. An error that it meets is raised by ``sync``: the system tells of it only once.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w+"))
        self._unsynced = 0
        self._wake = threading.Event()
        self._is_ending = False
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._sync_as_it_grows, daemon=True)

    def __enter__(self) -> SyncedFile:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self.close()

    def sync(self) -> None:
        """Make all of it durable; the last call before the end."""
        self._end()
        if self._error is not None:
            raise self._error
        self.flush()
        os.fsync(self.fileno())

    def write(self, data: ReadableBuffer) -> int:
        """As any file."""
        num_bytes = super().write(data)
        self._unsynced += num_bytes
        if self._unsynced >= _SYNC_BYTES:
            self._unsynced = 0
            self._wake.set()
        return num_bytes

    def _sync_as_it_grows(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._is_ending:
                return
            try:
                os.fdatasync(self.fileno())
            except OSError as error:
                self._error = error
                return

    def _end(self) -> None:
        self._is_ending = True
        self._wake.set()
        self._thread.join()

"""A new file whose bytes go to disk while more of them are made, past the system's cache where it lets them."""

from __future__ import annotations

import errno
import io
import mmap
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_BLOCK_BYTES = 4 << 20
_NUM_BLOCKS = 2
_PAGE = max(4096, mmap.PAGESIZE)  # what bypasses the cache begins and ends at multiples of it, in file and memory
WAITING_BYTES = _NUM_BLOCKS * _BLOCK_BYTES


class SyncedFile(io.FileIO):
    """Opened for writing and reading. What is written is copied to one of two blocks of 4 MiB; a thread writes one
    while the other is filled.

    Whole pages bypass the cache: filling it with what nobody reads soon costs more than the disk does where memory is
    short or new. The bytes are in the file after ``sync``; an error of the thread is raised by the next ``write`` that
    needs a block, or by ``sync``.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w+")
        self._direct = _open_direct(path)
        self._free: SimpleQueue[mmap.mmap] = SimpleQueue()
        for _ in range(_NUM_BLOCKS):
            self._free.put(mmap.mmap(-1, _BLOCK_BYTES))
        self._filled: SimpleQueue[_Block | None] = SimpleQueue()
        self._block: _Block | None = None
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._write_blocks, daemon=True)

    def __enter__(self) -> SyncedFile:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._filled.put(None)
        self._thread.join()
        if self._direct is not None:
            os.close(self._direct)
        self.close()

    def write(self, data: ReadableBuffer) -> int:
        """All of ``data`` at the file's position, sooner or later."""
        left = memoryview(data).cast("B")
        num_bytes, position = len(left), self.tell()
        while left:
            block = self._block_at(position)
            count = block.put(left, position)
            left, position = left[count:], position + count
        self.seek(position)
        return num_bytes

    def sync(self) -> None:
        """Make all of it durable; the last call before the end."""
        self._hand_over()
        self._filled.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error
        os.fsync(self.fileno())

    def _block_at(self, position: int) -> _Block:
        """A block that has room at ``position``; waits for one that is written."""
        if self._block is None or not self._block.has_room(position):
            self._hand_over()
            buffer = self._free.get()
            if self._error is not None:
                raise self._error
            page = position - position % _PAGE
            self._block = _Block(buffer, page, position - page, position - page)
        return self._block

    def _hand_over(self) -> None:
        if self._block is not None:
            self._filled.put(self._block)
            self._block = None

    def _write_blocks(self) -> None:
        """Takes filled blocks, writes them and frees them until it gets None; after an error only frees them."""
        while (block := self._filled.get()) is not None:
            try:
                if self._error is None:
                    self._write_block(block)
            except OSError as error:
                self._error = error
            self._free.put(block.buffer)

    def _write_block(self, block: _Block) -> None:
        first, last = -(-block.first // _PAGE) * _PAGE, block.last // _PAGE * _PAGE
        if self._direct is None or first >= last:
            _write_all(self.fileno(), block, block.first, block.last)
            return
        _write_all(self.fileno(), block, block.first, first)
        try:
            _write_all(self._direct, block, first, last)
        except OSError as error:
            if error.errno != errno.EINVAL:  # that is of a file system that asks for more than whole pages
                raise
            _write_all(self.fileno(), block, first, last)
        _write_all(self.fileno(), block, last, block.last)


@dataclass
class _Block:
    """Bytes ``first`` to ``last`` of ``buffer`` are of the file, whose byte ``page`` (a page's first) is byte 0."""

    buffer: mmap.mmap
    page: int
    first: int
    last: int

    def has_room(self, position: int) -> bool:
        """Whether bytes at ``position`` of the file can be put here, over those that are here or right behind them."""
        return self.first <= position - self.page <= self.last and position - self.page < len(self.buffer)

    def put(self, data: memoryview, position: int) -> int:
        """Copy what there is room for; returns how many bytes."""
        start = position - self.page
        count = min(len(data), len(self.buffer) - start)
        self.buffer[start : start + count] = data[:count]
        self.last = max(self.last, start + count)
        return count


def _open_direct(path: Path) -> int | None:
    """A descriptor whose writes bypass the cache, None where the file system (or the system) has no such thing."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return None


def _write_all(descriptor: int, block: _Block, start: int, stop: int) -> None:
    with memoryview(block.buffer) as view:
        while start < stop:
            start += os.pwrite(descriptor, view[start:stop], block.page + start)

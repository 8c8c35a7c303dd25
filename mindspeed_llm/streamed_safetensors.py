"""A safetensors file of tensors that come one after the other: none is held, the header is written last."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType

import torch

from hf_formats.safetensors import DTYPE_NAMES
from mindspeed_llm.conversion.synced_file import SyncedFile

HEADER_BYTES = (256 << 10) - 8  # kept free before the data and filled up with blanks, which the format allows
_ENDING = len("}")


class StreamedSafetensors:
    """Opened for one file; ``add`` while ``has_room``, then ``close``."""

    def __init__(self, path: Path) -> None:
        self._file = SyncedFile(path).__enter__()
        self._entries = ['{"__metadata__":{"format":"pt"}']
        self._header_bytes = len(self._entries[0]) + _ENDING
        self.names: list[str] = []
        self.num_bytes = 0  # of tensors
        self._file.seek(8 + HEADER_BYTES)

    def has_room(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the header has, and the tensor's place is a multiple of its elements' size."""
        text = self._entry(name, tensor)
        return self._header_bytes + len(text) + 1 <= HEADER_BYTES and self.num_bytes % tensor.element_size() == 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor that is contiguous, on the host; OSError when the disk cannot take it or what came before."""
        text = self._entry(name, tensor)
        self._entries.append(text)
        self._header_bytes += len(text) + 1
        self.names.append(name)
        self.num_bytes += tensor.nbytes
        self._file.write(tensor.view(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Write the header and make all of it durable."""
        header = (",".join(self._entries) + "}").encode().ljust(HEADER_BYTES)
        self._file.seek(0)
        self._file.write(HEADER_BYTES.to_bytes(8, "little") + header)
        self._file.sync()
        self.__exit__(None, None, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)

    def _entry(self, name: str, tensor: torch.Tensor) -> str:
        """The header's part of a tensor that comes next; ASCII, so as many bytes as characters."""
        offsets = [self.num_bytes, self.num_bytes + tensor.nbytes]
        spec = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        return f"{json.dumps(name)}:{json.dumps(spec, separators=(',', ':'))}"

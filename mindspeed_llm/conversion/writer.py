"""The seam between the conversion engine and the kinds of checkpoint that it can write."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from mindspeed_llm.weight_plan import TensorPlan

Form = Literal["plain", "fp8", "fp8_scale"]


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of an output file: ``dtype`` and ``shape`` as stored, row-major, and what fills it.

    ``content`` says which slices of which HF tensors it holds (its shape may be another view of the same elements).
    ``form`` "fp8" stores it quantised in 128 x 128 blocks, "fp8_scale" the scales of the "fp8" tensor right before it;
    a source in FP8 is stored as it is.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    content: TensorPlan
    form: Form = "plain"

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorRecord:
    """Where a written tensor lies in its file, in bytes, and the CRC-32 of these bytes."""

    offset: int
    num_bytes: int
    crc32: int


@dataclass(frozen=True)
class FileRecord:
    """A finished file: its size, its tensors by name, and the CRC-32 of all that lies between them (headers)."""

    num_bytes: int
    rest_crc32: int
    tensors: Mapping[str, TensorRecord]


class ByteSlabs:
    """The bytes of one tensor, in order and in slabs of bounded size, and the CRC-32 of what went by; iterate once."""

    def __init__(
        self, slabs: Iterator[Tensor], crc32: Callable[[memoryview, int], int], on_bytes: Callable[[int], None]
    ) -> None:
        self.crc32 = 0
        self._slabs, self._sum, self._on_bytes = slabs, crc32, on_bytes

    def __iter__(self) -> Iterator[memoryview]:
        for slab in self._slabs:
            raw = slab.reshape(-1).view(torch.uint8).numpy().data
            self.crc32 = self._sum(raw, self.crc32)
            yield raw
            self._on_bytes(raw.nbytes)


class Writer(Protocol):
    """A kind of checkpoint on disk, for one model and layout: which files it has, and how each is written.

    All but ``write`` and ``finish`` follow from the plan alone, so that jobs, sizes and dry runs need no work. A writer
    is pickled into worker processes, so it is plain data.
    """

    kind: ClassVar[str]  # as the manifest names it

    def files(self) -> Sequence[str]:
        """Paths below the output directory; each is one unit of work, of the journal and of resuming."""
        ...

    def tensors(self, file: str) -> Sequence[StoredTensor]:
        """What ``file`` holds, in the order in which it is written; names are unique in a file."""
        ...

    def file_bytes(self, file: str) -> int:
        """Exact size of ``file``."""
        ...

    def write(self, file: str, stream: BinaryIO, slabs: Callable[[StoredTensor], ByteSlabs]) -> Mapping[str, int]:
        """Write all of ``file`` to ``stream`` (seekable, at 0); returns tensor name -> offset of its first byte.

        Takes the slabs of each tensor once, in the order of ``tensors``, and keeps none of them.
        """
        ...

    def finish(self, directory: Path, records: Mapping[str, FileRecord]) -> None:
        """Write what lies beside the files (index, config, metadata); all files are in ``directory``. Repeatable."""
        ...

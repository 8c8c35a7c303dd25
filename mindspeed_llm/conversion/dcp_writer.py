"""Output kind: a directory of torch.distributed.checkpoint with the keys of the training engine's own checkpoints."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo  # what every reader of the format expects
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hf_formats.config import HFModelConfig, parse_hf_config
from hf_formats.files import write_bytes
from hf_formats.fp8 import BLOCK
from megatron.core.dist_checkpointing.saved_tensors import METADATA
from megatron.core.parallel_layout import ParallelLayout
from mindspeed_llm.conversion.torch_file import TensorRef, TorchFile, torch_file_layout
from mindspeed_llm.conversion.writer import ByteSlabs, FileRecord, StoredTensor
from mindspeed_llm.dcp_checkpoint import global_tensors
from mindspeed_llm.sharded_checkpoint import write_layout
from mindspeed_llm.weight_plan import TensorPlan, slice_rows
from mindspeed_llm.weight_source import WeightSource, stored_dtype

MAX_CHUNK_BYTES = 64 << 20  # as the training engine cuts
_ALIGNMENT = 64


@dataclass(frozen=True)
class DCPWriter:
    """Weights in ``num_files`` files of about one size, in model order, in the dtypes of ``source`` (BF16 for FP8).

    No layout is in them: a tensor is that of the whole model, cut into chunks of rows (of experts) that any layout
    reads its part of. ``hf_config`` is config.json as read.
    """

    source: WeightSource
    hf_config: Mapping[str, Any]
    mtp_num_layers: int
    num_files: int
    max_chunk_bytes: int = MAX_CHUNK_BYTES
    kind: ClassVar[str] = "torch_dist"

    def files(self) -> Sequence[str]:
        """``__0_0.distcp`` ..., those that hold something."""
        return list(self._chunks_of)

    def tensors(self, file: str) -> Sequence[StoredTensor]:
        return [chunk.stored for chunk in self._chunks_of[file]]

    def file_bytes(self, file: str) -> int:
        last = self._chunks_of[file][-1]
        return last.start + last.layout.num_bytes

    def write(self, file: str, stream: BinaryIO, slabs: Callable[[StoredTensor], ByteSlabs]) -> Mapping[str, int]:
        """One file: what ``torch.save`` makes of each chunk, one after the other."""
        offsets = {}
        for chunk in self._chunks_of[file]:
            stream.write(bytes(chunk.start - stream.tell()))
            found = chunk.layout.write(stream, slabs)
            offsets[chunk.stored.name] = chunk.start + found[chunk.stored.name]
        return offsets

    def finish(self, directory: Path, records: Mapping[str, FileRecord]) -> None:
        """``.metadata``, and layout.json with the config for the way back."""
        write_bytes(directory / METADATA, pickle.dumps(self._metadata()))
        sizes = {file: records[file].num_bytes for file in self.files()}
        write_layout(directory, "core", ParallelLayout(), self.hf_config, self.mtp_num_layers, sizes)

    def _metadata(self) -> Metadata:
        tensors: dict[str, TensorStorageMetadata] = {}
        places: dict[MetadataIndex, _StorageInfo] = {}
        for file, chunks in self._chunks_of.items():
            for chunk in chunks:
                if chunk.key not in tensors:
                    properties = TensorProperties(dtype=chunk.stored.dtype)
                    shape = torch.Size(self._globals[chunk.key].shape)
                    tensors[chunk.key] = TensorStorageMetadata(properties, shape, [])
                held, sizes = tensors[chunk.key].chunks, torch.Size(chunk.stored.shape)
                offsets = torch.Size((chunk.first_row, *(0 for _ in sizes[1:])))
                places[MetadataIndex(chunk.key, offsets, len(held))] = _StorageInfo(
                    file, chunk.start, chunk.layout.num_bytes
                )
                held.append(ChunkStorageMetadata(offsets, sizes))
        return Metadata(dict(tensors), storage_data=places)

    @cached_property
    def _hf(self) -> HFModelConfig:
        return parse_hf_config(self.hf_config).with_mtp(self.mtp_num_layers)

    @cached_property
    def _globals(self) -> Mapping[str, TensorPlan]:
        return global_tensors(self._hf)

    @cached_property
    def _chunks_of(self) -> Mapping[str, tuple[_Chunk, ...]]:
        total = sum(math.prod(t.shape) * stored_dtype(self.source, t).itemsize for t in self._globals.values())
        files: dict[str, list[_Chunk]] = {}
        passed = 0
        for key, first_row, stored in self._cut():
            chunks = files.setdefault(f"__{passed * self.num_files // total}_0.distcp", [])
            end = chunks[-1].start + chunks[-1].layout.num_bytes if chunks else 0
            layout = torch_file_layout(TensorRef(0, stored.shape, stored.dtype), [stored], stem="archive")
            chunks.append(_Chunk(key, first_row, -(-end // _ALIGNMENT) * _ALIGNMENT, stored, layout))
            passed += stored.num_bytes
        return {file: tuple(chunks) for file, chunks in files.items()}

    def _cut(self) -> Iterator[tuple[str, int, StoredTensor]]:
        """(key, first row, chunk) of all tensors; whole FP8 blocks where a chunk has several."""
        for key, tensor in self._globals.items():
            dtype, rows = stored_dtype(self.source, tensor), tensor.shape[0]
            step = max(1, self.max_chunk_bytes // (math.prod(tensor.shape[1:]) * dtype.itemsize))
            step -= step % BLOCK if step > BLOCK else 0
            for start in range(0, rows, step):
                part = slice_rows(tensor, start, min(start + step, rows))
                yield key, start, StoredTensor(f"{key}[{start}:{start + part.shape[0]}]", part.shape, dtype, part)


@dataclass(frozen=True)
class _Chunk:
    """Rows from ``first_row`` on of the tensor ``key``, saved from byte ``start`` of their file."""

    key: str
    first_row: int
    start: int
    stored: StoredTensor
    layout: TorchFile

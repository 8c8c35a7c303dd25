"""The tensors of a ``torch.distributed.checkpoint`` directory, read without process group and without its pickle."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

METADATA = ".metadata"

_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
}


@dataclass(frozen=True)
class SavedChunk:
    """A chunk of a tensor, written by ``torch.save`` to bytes [start, start + num_bytes) of ``file``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    num_bytes: int

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """[start, stop) of the chunk in every dimension of the tensor."""
        return tuple((start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of the whole model and its chunks, ordered by their offsets."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[SavedChunk, ...]

    @cached_property
    def most_rows(self) -> int:
        """The most rows (dim 0) of a chunk."""
        return max(chunk.sizes[0] for chunk in self.chunks)


def saved_tensors(directory: Path) -> Mapping[str, SavedTensor]:
    """Every tensor by its key, from ``.metadata``; ``ValueError`` when that is missing or unreadable."""
    metadata = read_metadata(directory)
    try:
        tensors = {key: t for key, t in metadata.state_dict_metadata.items() if isinstance(t, TensorStorageMetadata)}
        sizes = {key: {chunk.offsets: chunk.sizes for chunk in tensor.chunks} for key, tensor in tensors.items()}
        chunks: dict[str, list[SavedChunk]] = {key: [] for key in tensors}
        for index, info in metadata.storage_data.items():
            if index.fqn not in tensors:
                continue
            if getattr(info, "transform_descriptors", None):
                raise ValueError(f"{index.fqn} is stored with {info.transform_descriptors}; only plain files are read")
            size = sizes[index.fqn][index.offset]
            chunk = SavedChunk(tuple(index.offset), tuple(size), info.relative_path, info.offset, info.length)
            chunks[index.fqn].append(chunk)
        return {
            key: SavedTensor(tuple(tensor.size), tensor.properties.dtype, tuple(sorted(chunks[key], key=_by_offsets)))
            for key, tensor in tensors.items()
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{directory / METADATA} does not say where its tensors lie: {error!r}") from error


def _by_offsets(chunk: SavedChunk) -> tuple[int, ...]:
    return chunk.offsets


def read_metadata(directory: Path) -> Metadata:
    """``.metadata`` of a directory, read by an unpickler that accepts only the classes of this format."""
    path = directory / METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: {directory} holds no distributed checkpoint") from None
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{path} holds a {type(metadata).__name__}, not the metadata of a distributed checkpoint")
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no such file does")

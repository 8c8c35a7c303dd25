"""The tensors of a ``torch.distributed.checkpoint`` directory, read without process group and without its pickle."""

from __future__ import annotations

import collections
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch.distributed._shard.sharded_tensor import metadata as sharded_metadata
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hf_formats.listed_pickle import PATHS, Names, load_listed

METADATA = ".metadata"

_MODULES = {
    metadata: (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    sharded_metadata: ("MEM_FORMAT_ENCODING", "TensorProperties"),  # of torch before 2.3
    filesystem: ("_StorageInfo",),
    torch.serialization: ("_get_layout",),
    torch: ("Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))),
    collections: ("OrderedDict",),
}
CHECKPOINT_NAMES: Names = PATHS | {
    (module.__name__, name): getattr(module, name)
    for module, names in _MODULES.items()
    for name in names
    if hasattr(module, name)
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
    found = read_metadata(directory)
    try:
        tensors = {key: t for key, t in found.state_dict_metadata.items() if isinstance(t, TensorStorageMetadata)}
        sizes = {key: {chunk.offsets: chunk.sizes for chunk in tensor.chunks} for key, tensor in tensors.items()}
        chunks: dict[str, list[SavedChunk]] = {key: [] for key in tensors}
        for index, info in found.storage_data.items():
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
            found = load_listed(file, CHECKPOINT_NAMES, "a distributed checkpoint's metadata")
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: {directory} holds no distributed checkpoint") from None
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, Metadata):
        raise ValueError(f"{path} holds a {type(found).__name__}, not the metadata of a distributed checkpoint")
    return found

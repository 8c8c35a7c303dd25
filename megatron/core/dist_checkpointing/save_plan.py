"""Which rank writes which chunk, so that every element of every global tensor is written exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megatron.core.dist_checkpointing.mapping import Shape, ShardedTensor

Chunk = tuple[Shape, Shape]  # offsets, sizes


@dataclass(frozen=True)
class TensorChunks:
    """The chunks of one global tensor that a rank owns."""

    dtype: torch.dtype
    shape: Shape
    chunks: tuple[Chunk, ...]


OwnedChunks = dict[str, TensorChunks]  # by key


@dataclass(frozen=True)
class GlobalPlan:
    """The checkpoint's content, and for every rank the (key, chunk number) that it writes."""

    metadata: Metadata
    chunks_of_rank: tuple[tuple[tuple[str, int], ...], ...]

    def save_plan(self, rank: int) -> SavePlan:
        """The write requests of one rank."""
        items = []
        for key, number in self.chunks_of_rank[rank]:
            tensor = self.metadata.state_dict_metadata[key]
            assert isinstance(tensor, TensorStorageMetadata)
            chunk = tensor.chunks[number]
            written = TensorWriteData(chunk, tensor.properties, tensor.size)
            index = MetadataIndex(key, chunk.offsets, number)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=written))
        return SavePlan(items)


def owned_chunks(shards: Iterable[ShardedTensor]) -> OwnedChunks:
    """The distinct chunks of a rank; equal on ranks that own the same."""
    by_key: dict[str, list[ShardedTensor]] = {}
    for shard in shards:
        by_key.setdefault(shard.key, []).append(shard)
    return {
        key: TensorChunks(own[0].tensor.dtype, own[0].global_shape, tuple({(s.offsets, s.sizes): None for s in own}))
        for key, own in by_key.items()
    }


def make_global_plan(chunks_of_ranks: Sequence[OwnedChunks]) -> GlobalPlan:
    """Divide the writing: a chunk that several ranks own is written by the one that has least to write so far.

    Deterministic, so that every rank makes the same plan. Raises ``ValueError`` when the ranks do not agree on a
    tensor, or when their chunks overlap or leave gaps.
    """
    tensors: dict[str, TensorChunks] = {}
    owners: dict[tuple[str, Chunk], list[int]] = {}
    problems = []
    for rank, chunks_of_rank in enumerate(chunks_of_ranks):
        for key, own in chunks_of_rank.items():
            first = tensors.setdefault(key, own)
            if (first.dtype, first.shape) != (own.dtype, own.shape):
                problems.append(f"{key} is {first.dtype} {first.shape} on one rank, {own.dtype} {own.shape} on {rank}")
            for chunk in own.chunks:
                owners.setdefault((key, chunk), []).append(rank)
    chunks: dict[str, list[Chunk]] = {}
    for key, chunk in owners:
        chunks.setdefault(key, []).append(chunk)
    problems += [text for key, all_ in chunks.items() for text in coverage_problems(key, tensors[key].shape, all_)]
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError("the ranks' parts do not make up a checkpoint: " + "; ".join(problems[:8]) + more)
    return GlobalPlan(_metadata(tensors, chunks), _divide(tensors, chunks, owners, len(chunks_of_ranks)))


def coverage_problems(key: str, shape: Shape, chunks: Sequence[Chunk]) -> list[str]:
    """Why ``chunks`` do not hold every element of ``shape`` exactly once; empty when they do."""
    for offsets, sizes in chunks:
        if any(low < 0 or low + size > whole for low, size, whole in zip(offsets, sizes, shape, strict=True)):
            return [f"{key}: {sizes} at {offsets} is outside of {shape}"]
    active: list[Chunk] = []
    for chunk in sorted(chunks):  # by the first dimension, in which only the last few can reach this one
        begin = chunk[0][:1]
        active = [other for other in active if not begin or other[0][0] + other[1][0] > begin[0]]
        for other in active:
            if _overlap(chunk, other):
                return [f"{key}: {chunk[1]} at {chunk[0]} and {other[1]} at {other[0]} overlap"]
        active.append(chunk)
    num_held = sum(prod(sizes) for _, sizes in chunks)
    if num_held != prod(shape):
        return [f"{key}: {num_held} of {prod(shape)} elements are held by a rank"]
    return []


def _overlap(one: Chunk, other: Chunk) -> bool:
    return all(
        low < other_low + other_size and other_low < low + size
        for low, size, other_low, other_size in zip(*one, *other, strict=True)
    )


def _metadata(tensors: Mapping[str, TensorChunks], chunks: Mapping[str, Sequence[Chunk]]) -> Metadata:
    found = {}
    for key, tensor in tensors.items():
        parts = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks[key]]
        found[key] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), parts)
    return Metadata(dict(found))


def _divide(
    tensors: Mapping[str, TensorChunks],
    chunks: Mapping[str, Sequence[Chunk]],
    owners: Mapping[tuple[str, Chunk], Sequence[int]],
    num_ranks: int,
) -> tuple[tuple[tuple[str, int], ...], ...]:
    tasks = [
        (prod(chunk[1]) * tensors[key].dtype.itemsize, key, number, owners[key, chunk])
        for key, own in chunks.items()
        for number, chunk in enumerate(own)
    ]
    num_bytes = [0] * num_ranks
    chunks_of_rank: list[list[tuple[str, int]]] = [[] for _ in range(num_ranks)]
    # Chunks with one owner leave no choice; of the others the large ones come first, so that small ones even out.
    for size, key, number, ranks in sorted(tasks, key=lambda task: (len(task[3]) > 1, -task[0])):
        rank = min(ranks, key=lambda candidate: num_bytes[candidate])
        num_bytes[rank] += size
        chunks_of_rank[rank].append((key, number))
    return tuple(tuple(sorted(own)) for own in chunks_of_rank)

"""Which rank writes which piece, so that every element of every global tensor is written exactly once."""

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

from megatron.core.dist_checkpointing.mapping import Piece, Shape

Chunk = tuple[Shape, Shape]  # offsets, sizes


@dataclass(frozen=True)
class Offer:
    """What a rank holds of one global tensor."""

    dtype: torch.dtype
    shape: Shape
    chunks: tuple[Chunk, ...]


Offers = dict[str, Offer]


@dataclass(frozen=True)
class GlobalPlan:
    """The checkpoint's content, and for every rank the (key, chunk number) it writes."""

    metadata: Metadata
    of_rank: tuple[tuple[tuple[str, int], ...], ...]

    def save_plan(self, rank: int) -> SavePlan:
        """The write requests of one rank."""
        items = []
        for key, number in self.of_rank[rank]:
            tensor = self.metadata.state_dict_metadata[key]
            assert isinstance(tensor, TensorStorageMetadata)
            chunk = tensor.chunks[number]
            written = TensorWriteData(chunk, tensor.properties, tensor.size)
            index = MetadataIndex(key, chunk.offsets, number)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=written))
        return SavePlan(items)


def offers_of(pieces: Iterable[Piece]) -> Offers:
    """The same for all ranks that hold the same; a piece that this rank holds twice is offered once."""
    by_key: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_key.setdefault(piece.key, []).append(piece)
    return {
        key: Offer(held[0].tensor.dtype, held[0].global_shape, tuple({(p.offsets, p.sizes): None for p in held}))
        for key, held in by_key.items()
    }


def make_global_plan(offers: Sequence[Offers]) -> GlobalPlan:
    """Divide what the ranks offer: a piece that several hold goes to the one that has least to write so far.

    Deterministic, so that every rank makes the same plan. Raises ``ValueError`` when the ranks do not agree on a
    tensor, or when their pieces overlap or leave gaps.
    """
    described: dict[str, Offer] = {}
    holders: dict[tuple[str, Chunk], list[int]] = {}
    problems = []
    for rank, offered in enumerate(offers):
        for key, offer in offered.items():
            first = described.setdefault(key, offer)
            if (first.dtype, first.shape) != (offer.dtype, offer.shape):
                problems.append(
                    f"{key} is {first.dtype} {first.shape} on one rank, {offer.dtype} {offer.shape} on {rank}"
                )
            for chunk in offer.chunks:
                holders.setdefault((key, chunk), []).append(rank)
    chunks: dict[str, list[Chunk]] = {}
    for key, chunk in holders:
        chunks.setdefault(key, []).append(chunk)
    problems += [text for key, own in chunks.items() for text in coverage_problems(key, described[key].shape, own)]
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ValueError("the ranks' parts do not make up a checkpoint: " + "; ".join(problems[:8]) + more)
    return GlobalPlan(_metadata(described, chunks), _divide(described, chunks, holders, len(offers)))


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


def _metadata(described: Mapping[str, Offer], chunks: Mapping[str, Sequence[Chunk]]) -> Metadata:
    tensors = {}
    for key, offer in described.items():
        parts = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks[key]]
        tensors[key] = TensorStorageMetadata(TensorProperties(dtype=offer.dtype), torch.Size(offer.shape), parts)
    return Metadata(dict(tensors))


def _divide(
    described: Mapping[str, Offer],
    chunks: Mapping[str, Sequence[Chunk]],
    holders: Mapping[tuple[str, Chunk], Sequence[int]],
    num_ranks: int,
) -> tuple[tuple[tuple[str, int], ...], ...]:
    tasks = [
        (prod(chunk[1]) * described[key].dtype.itemsize, key, number, holders[key, chunk])
        for key, own in chunks.items()
        for number, chunk in enumerate(own)
    ]
    num_bytes = [0] * num_ranks
    of_rank: list[list[tuple[str, int]]] = [[] for _ in range(num_ranks)]
    # What has one holder leaves no choice; then the large ones first, the small ones even the ranks out.
    for size, key, number, ranks in sorted(tasks, key=lambda task: (len(task[3]) > 1, -task[0])):
        rank = min(ranks, key=lambda candidate: num_bytes[candidate])
        num_bytes[rank] += size
        of_rank[rank].append((key, number))
    return tuple(tuple(sorted(own)) for own in of_rank)

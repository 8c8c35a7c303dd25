"""A rank's shards of the tensors of the whole model, under names and at offsets that do not depend on the layout."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from torch import Tensor, nn

from megatron.core.parallel_layout import ParallelLayout, RankCoords

Shape = tuple[int, ...]

_LAYER = re.compile(r"(?:chunks\.\d+\.)?decoder\.layers\.\d+")
_CHUNK = re.compile(r"chunks\.\d+\.")
_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class ShardedTensor:
    """A hyper-rectangle of a global tensor and its memory on this rank.

    key: name of the global tensor · global_shape: its shape · offsets: index of the shard's first element in it ·
    tensor: a view of the shard's values, read when the checkpoint is saved and written in place when it is loaded.
    """

    key: str
    global_shape: Shape
    offsets: Shape
    tensor: Tensor

    @property
    def sizes(self) -> Shape:
        return tuple(self.tensor.shape)

    def split(self, max_bytes: int) -> Iterator[ShardedTensor]:
        """Parts of at most ``max_bytes``, cut along the first dimensions; the shard itself if it is small enough."""
        num_bytes = self.tensor.numel() * self.tensor.element_size()
        dim = next((dim for dim, size in enumerate(self.sizes) if size > 1), None)
        if num_bytes <= max_bytes or dim is None:
            yield self
            return
        size = self.sizes[dim]
        step = max(1, max_bytes * size // num_bytes)
        for start in range(0, size, step):
            offsets = (*self.offsets[:dim], self.offsets[dim] + start, *self.offsets[dim + 1 :])
            part = self.tensor.narrow(dim, start, min(step, size - start))
            yield from ShardedTensor(self.key, self.global_shape, offsets, part).split(max_bytes)


@dataclass(frozen=True)
class Span:
    """``size`` elements of a dimension, from ``local_start`` in the local and ``global_start`` in the global tensor."""

    local_start: int
    global_start: int
    size: int


@dataclass(frozen=True)
class Placement:
    """The position of a local tensor in the global one: ``spans[d]`` cover dimension d of the local tensor in order."""

    key: str
    local_shape: Shape
    global_shape: Shape
    spans: tuple[tuple[Span, ...], ...]

    def shards(self, key: str, flat: Tensor, start: int, stop: int) -> Iterator[ShardedTensor]:
        """The shards of elements [start, stop) of the flattened local tensor, whose values are ``flat``."""
        strides = [prod(self.local_shape[dim + 1 :]) for dim in range(len(self.local_shape))]
        for offsets, sizes in rectangles(self.local_shape, start, stop):
            for parts in product(*map(_overlaps, self.spans, offsets, sizes)):
                first = sum(part.local_start * stride for part, stride in zip(parts, strides, strict=True))
                view = flat.as_strided([part.size for part in parts], strides, flat.storage_offset() + first - start)
                yield ShardedTensor(key, self.global_shape, tuple(part.global_start for part in parts), view)


def rectangles(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Shape, Shape]]:
    """(offsets, sizes) of the fewest rectangles that cover elements [start, stop) of a row-major tensor.

    At most 2 n - 1 of them in n dimensions: the end of a row, whole rows, the beginning of a row.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # whole rows
    if first > last or start < first * inner:
        row = start // inner
        for offsets, sizes in rectangles(shape[1:], start - row * inner, min(stop, (row + 1) * inner) - row * inner):
            yield (row, *offsets), (1, *sizes)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if first <= last and last * inner < stop:
        for offsets, sizes in rectangles(shape[1:], 0, stop - last * inner):
            yield (last, *offsets), (1, *sizes)


def _overlaps(spans: Sequence[Span], offset: int, size: int) -> list[Span]:
    """The parts of ``spans`` that lie in [offset, offset + size) of a local dimension."""
    found = []
    for span in spans:
        low, high = max(span.local_start, offset), min(span.local_start + span.size, offset + size)
        if low < high:
            found.append(Span(low, span.global_start + low - span.local_start, high - low))
    return found


def global_names(module: nn.Module) -> dict[str, str]:
    """Layout-independent key of every parameter and persistent buffer by its name in ``module`` (no DDP wrapper).

    ``decoder.layers.{i}``, a layer of this stage, gets its number in the model; ``chunks.{v}.`` is removed. An output
    layer's copy of a shared embedding gets the embedding's key.
    """
    layers = {
        name: f"decoder.layers.{layer.global_layer}"
        for name, layer in module.named_modules()
        if _LAYER.fullmatch(name) and hasattr(layer, "global_layer")
    }
    shared = {name for name, param in module.named_parameters() if getattr(param, "shared_embedding", False)}
    keys = {}
    for name in module.state_dict():
        match = _LAYER.match(name)
        key = layers.get(match.group(), match.group()) + name[match.end() :] if match else _CHUNK.sub("", name, count=1)
        keys[name] = _EMBEDDING if name in shared and key == "output_layer.weight" else key
    return keys


def placement_of(key: str, tensor: Tensor, param: Any, layout: ParallelLayout, coords: RankCoords) -> Placement:
    """The placement of ``tensor`` by the attributes of its parameter; ``param`` is None for a buffer: all ranks own it.

    Dense weights are split over TP along ``partition_dim``. With ``partition_stride`` s that dimension holds s tensors
    one after the other, each of which is split. Experts (``allreduce`` False) are split over EP along dimension 0 and
    over expert TP along ``partition_dim``.
    """
    is_expert = not getattr(param, "allreduce", True)
    splits = [(1, 0, 1)] * tensor.dim()  # (ranks, this rank, stride) of every dimension
    if is_expert:
        splits[0] = (layout.expert_model_parallel_size, coords.ep, 1)
    dim = getattr(param, "partition_dim", -1)
    if getattr(param, "tensor_model_parallel", False) or (is_expert and dim > 0):
        size = layout.expert_tensor_parallel_size if is_expert else layout.tensor_model_parallel_size
        splits[dim] = (size, coords.etp if is_expert else coords.tp, getattr(param, "partition_stride", 1))
    shape = tuple(tensor.shape)
    spans = tuple(_split(size, *split) for size, split in zip(shape, splits, strict=True))
    global_shape = tuple(size * ranks for size, (ranks, _, _) in zip(shape, splits, strict=True))
    return Placement(key, shape, global_shape, spans)


def _split(size: int, num_ranks: int, rank: int, stride: int) -> tuple[Span, ...]:
    assert size % stride == 0, f"{size} elements do not divide into {stride} tensors"
    part = size // stride
    if num_ranks == 1:
        return (Span(0, 0, size),)
    return tuple(Span(index * part, (index * num_ranks + rank) * part, part) for index in range(stride))

"""Weights in a directory of torch.distributed.checkpoint, the training engine's own kind, as a source of HF tensors."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hf_formats.config import HFModelConfig
from hf_formats.file_region import FileReader, FileRegion
from hf_formats.finite import require_finite
from hf_formats.problems import raise_problems, shown_names
from hf_formats.ranges import Ranges, index_of, intersection, relative, shape_of
from megatron.core.dist_checkpointing.common import COMMON
from megatron.core.dist_checkpointing.manifest import read_manifest
from megatron.core.dist_checkpointing.saved_tensors import METADATA, SavedChunk, SavedTensor, saved_tensors
from megatron.core.parallel_layout import ParallelLayout
from mindspeed_llm.saved_tensor import saved_region
from mindspeed_llm.sharded_checkpoint import LATEST_NAME
from mindspeed_llm.weight_plan import Shard, TensorPlan, local_plan
from mindspeed_llm.weight_source import PlannedCheckpoint

PREFIX = "model."  # of the keys of weights, beside ``optimizer.`` and ``rng.``


def is_dcp(path: Path) -> bool:
    """Whether ``path`` is a directory of torch.distributed.checkpoint."""
    return (path / METADATA).is_file()


def weights_of(path: Path) -> Path:
    """Where the weights are of a step's folder (``global_step_N``) or of a run's, its last step; else ``path``."""
    if not is_dcp(path):
        newest = path / LATEST_NAME
        step = newest.read_text(encoding="utf-8").strip() if newest.is_file() else ""
        for found in (path / "actor", path / f"global_step_{step}" / "actor"):
            if is_dcp(found):
                return found
    return path


def global_tensors(hf: HFModelConfig) -> dict[str, TensorPlan]:
    """Key -> tensor of the whole model under the training engine's names: what one rank alone would hold.

    No layout changes them: a checkpoint that any layout wrote has these, cut into chunks in one way or another.
    """
    whole = ParallelLayout()
    return {PREFIX + tensor.name: tensor for tensor in local_plan(hf, whole, 0)}


class DCPCheckpoint(PlannedCheckpoint):
    """The model part of a training checkpoint, or a directory of weights alone; no process group is needed.

    Of the chunks only what a slice asks for is read. Missing and truncated files are named with their tensors at
    construction, and tensors that ``hf`` calls for and the directory lacks or has in other shapes; what it has beyond
    them (optimizer state, multi-token-prediction layers that ``hf`` leaves out) is not looked at.
    """

    def __init__(self, path: str | Path, hf: HFModelConfig) -> None:
        super().__init__(Path(path), hf, ParallelLayout(), "core")
        stored = saved_tensors(self.path)
        self._tensors = {key: stored[key] for key in global_tensors(hf) if key in stored}
        self._check()
        self._slices = FileReader()
        self._regions: dict[tuple[str, tuple[int, ...]], FileRegion] = {}

    def __reduce__(self) -> tuple[type[DCPCheckpoint], tuple[object, ...]]:
        return DCPCheckpoint, (self.path, self.hf)

    def close(self) -> None:
        self._slices.close()

    @property
    def bytes_read(self) -> int:
        """Bytes read from the files so far, the chunks' own headers among them."""
        return self._slices.bytes_read

    def describe(self) -> str:
        """Which form it is, and what is in it, for a log."""
        if (self.path / COMMON).is_file():
            return f"the model part of a training checkpoint that {read_manifest(self.path).layout} saved"
        return "a distributed checkpoint of weights"

    def files(self) -> list[Path]:
        """Every file that decides what this source holds."""
        held = {chunk.file for tensor in self._tensors.values() for chunk in tensor.chunks}
        return [self.path / name for name in (METADATA, *sorted(held))]

    def dtype(self, hf_name: str) -> torch.dtype:
        return self._tensors[PREFIX + self._shards[hf_name][0].param].dtype

    def fill(self, local: Tensor, tensor: TensorPlan) -> None:
        """``weight_source.fill`` for a tensor of the training engine, which is stored in the same orientation.

        Shards that are neighbours in the file, such as an expert's gate and up and the experts of a rank, are read
        together.
        """
        for read in self._reads(tensor):
            view = local[index_of(read.local)]
            for common, part in self._parts(read.key, read.stored):
                require_finite(read.key, part, str(self.path))
                view[relative(common, read.stored)].copy_(part)

    def _reads(self, tensor: TensorPlan) -> list[_Read]:
        reads: list[_Read] = []
        for shard in tensor.shards:
            for stored in self._shards[shard.hf_name]:
                common = intersection(shard.ranges, stored.ranges)
                if common is None:
                    continue
                assert shard.transpose == stored.transpose, f"{tensor.name} is not named as in training"
                reads.append(_Read(PREFIX + stored.param, _local_ranges(shard, common), _local_ranges(stored, common)))
                while len(reads) > 1 and (joined := reads[-2].joined(reads[-1])) is not None:
                    reads[-2:] = [joined]
        num_found = sum(math.prod(shape_of(read.local)) for read in reads)
        assert num_found == tensor.num_elements, f"{tensor.name}: {num_found} of {tensor.num_elements} elements"
        return reads

    def _read_shard(self, shard: Shard, ranges: Ranges) -> Tensor:
        """The part ``ranges`` of a shard, in the orientation of the HF tensor."""
        key, stored = PREFIX + shard.param, _local_ranges(shard, ranges)
        found: Tensor | None = None
        for common, part in self._parts(key, stored):
            if common == stored:
                found = part
            else:
                found = torch.empty(shape_of(stored), dtype=part.dtype) if found is None else found
                found[relative(common, stored)] = part
        assert found is not None, f"the constructor checked that {key} has chunks"
        found = found.squeeze(0) if found.dim() > len(ranges) else found
        return found.T if shard.transpose else found

    def _parts(self, key: str, ranges: Ranges) -> Iterator[tuple[Ranges, Tensor]]:
        """(part of ``ranges``, its elements), chunk by chunk; ValueError at the end when elements are in no chunk."""
        stored, num_read = self._tensors[key], 0
        for chunk, common in _touched(stored, ranges):
            inside = tuple((part.start, part.stop) for part in relative(common, chunk.ranges))
            part = self._slices.read(key, self._region(key, chunk, stored.dtype), inside)
            num_read += part.numel()
            yield common, part
        if num_read != math.prod(shape_of(ranges)):
            raise ValueError(f"{self.path}: the chunks of {key} hold {num_read} of the elements {ranges}")

    def _region(self, key: str, chunk: SavedChunk, dtype: torch.dtype) -> FileRegion:
        found = self._regions.get((key, chunk.offsets))
        if found is None:
            span = (chunk.start, chunk.start + chunk.num_bytes)
            found = saved_region(self._slices, key, self.path / chunk.file, span, chunk.sizes, dtype)
            self._regions[key, chunk.offsets] = found
        return found

    def _check(self) -> None:
        problems = []
        for key, tensor in global_tensors(self.hf).items():
            found = self._tensors.get(key)
            if found is None:
                problems.append(f"{key} is not in it")
            elif found.shape != tensor.shape:
                problems.append(f"{key} has shape {found.shape}; the config makes it {tensor.shape}")
        ends: dict[str, int] = {}
        keys: dict[str, dict[str, None]] = {}
        for key, stored in self._tensors.items():
            for chunk in stored.chunks:
                ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.start + chunk.num_bytes)
                keys.setdefault(chunk.file, {})[key] = None
        for name, end in sorted(ends.items()):
            file, held = self.path / name, list(keys[name])
            if not file.is_file():
                problems.append(f"{name} is missing; it holds parts of {shown_names(held)}")
            elif file.stat().st_size < end:
                cut = [key for key in held if self._is_cut(key, name, file.stat().st_size)]
                problems.append(
                    f"{name} is truncated: {file.stat().st_size} of {end} bytes, which cuts {shown_names(cut)}"
                )
        raise_problems(f"distributed checkpoint {self.path}", problems, "Give the config.json with which it was made.")

    def _is_cut(self, key: str, file: str, size: int) -> bool:
        chunks = self._tensors[key].chunks
        return any(chunk.file == file and chunk.start + chunk.num_bytes > size for chunk in chunks)


@dataclass(frozen=True)
class _Read:
    """local_tensor[local] = stored_tensor[stored], where ``key`` names the stored tensor."""

    key: str
    local: Ranges
    stored: Ranges

    def joined(self, other: _Read) -> _Read | None:
        """One read instead of both, if the other continues this one along one dimension on both sides."""
        if self.key != other.key:
            return None
        apart = [dim for dim in range(len(self.local)) if self.local[dim] != other.local[dim]]
        if (
            apart != [dim for dim in range(len(self.stored)) if self.stored[dim] != other.stored[dim]]
            or len(apart) != 1
        ):
            return None
        dim = apart[0]
        if self.local[dim][1] != other.local[dim][0] or self.stored[dim][1] != other.stored[dim][0]:
            return None
        return _Read(self.key, _extended(self.local, other.local, dim), _extended(self.stored, other.stored, dim))


def _extended(first: Ranges, second: Ranges, dim: int) -> Ranges:
    return (*first[:dim], (first[dim][0], second[dim][1]), *first[dim + 1 :])


def _local_ranges(shard: Shard, ranges: Ranges) -> Ranges:
    """Where the part of a shard that is ``ranges`` of the HF tensor lies in the local tensor."""
    inside = [(a - c, b - c) for (a, b), (c, _) in zip(ranges, shard.ranges, strict=True)]
    if shard.transpose:
        inside.reverse()
    leading = shard.local_ranges[: len(shard.local_ranges) - len(inside)]
    base = shard.local_ranges[len(leading) :]
    return (*leading, *((start + a, start + b) for (start, _), (a, b) in zip(base, inside, strict=True)))


def _touched(stored: SavedTensor, ranges: Ranges) -> Iterator[tuple[SavedChunk, Ranges]]:
    """The chunks that overlap ``ranges``, each with the common part; chunks are ordered by their first dimension."""
    chunks = stored.chunks
    first, last = 0, len(chunks)
    if ranges and len(chunks) > 1:
        first = bisect_right(chunks, ranges[0][0] - stored.most_rows, key=lambda chunk: chunk.offsets[0])
        last = bisect_left(chunks, ranges[0][1], key=lambda chunk: chunk.offsets[0])
    for chunk in chunks[first:last]:
        common = intersection(ranges, chunk.ranges)
        if common is not None:
            yield chunk, common

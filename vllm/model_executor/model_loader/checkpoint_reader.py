"""Weights of a checkpoint directory that stay in their files until a slice of them is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from vllm.model_executor.layers.quantization.fp8 import FP8_DTYPE, SCALE_SUFFIX, Fp8Weight
from vllm.model_executor.model_loader.file_slices import FileSlices, Region
from vllm.model_executor.model_loader.weight_target import Weight

INDEX_NAME = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit
_SHOWN_PROBLEMS = 12
_SHOWN_NAMES = 3
_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": FP8_DTYPE,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}


class UnreadTensor:
    """A tensor of a checkpoint, still in its file; `unread[rows, columns]` reads that slice."""

    def __init__(self, name: str, region: Region, slices: FileSlices) -> None:
        self.name, self._region, self._slices = name, region, slices
        self.shape, self.dtype = region.shape, region.dtype

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        parts = (*index, *[slice(None)] * (len(self.shape) - len(index)))
        extent = tuple(part.indices(size)[:2] for part, size in zip(parts, self.shape, strict=True))
        return self._slices.read(self.name, self._region, extent)


class CheckpointReader:
    """A Hugging Face directory whose weights are read by the slice; `close` it.

    The constructor reads the headers. ValueError names every file that is missing, cut short or without a tensor that
    the index places in it, with its tensors, and every FP8 weight without scales.
    """

    def __init__(self, model_dir: str) -> None:
        self._slices = FileSlices()
        self._regions = _regions_of(Path(model_dir))

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read so far."""
        return self._slices.bytes_read

    def close(self) -> None:
        """Close the files."""
        self._slices.close()

    def weights(self, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, Weight]]:
        """(hf_name, weight that is still in its file) of every wanted tensor, file by file."""
        for name, region in self._regions.items():
            if name.endswith(SCALE_SUFFIX) or not is_wanted(name):
                continue
            if region.dtype == FP8_DTYPE:
                yield name, Fp8Weight(self._unread(name), self._unread(name + SCALE_SUFFIX))
            else:
                yield name, self._unread(name)

    def _unread(self, name: str) -> UnreadTensor:
        return UnreadTensor(name, self._regions[name], self._slices)


def _regions_of(root: Path) -> dict[str, Region]:
    regions: dict[str, Region] = {}
    problems = []
    for file, names in _tensors_of_files(root).items():
        try:
            found = _read_header(root / file)
        except ValueError as error:
            shown = ", ".join(names[:_SHOWN_NAMES]) + ("" if len(names) <= _SHOWN_NAMES else ", ...")
            problems.append(f"{error}" + (f"; it should hold {len(names)} tensors: {shown}" if names else ""))
            continue
        absent = [name for name in names if name not in found]
        problems += [f"{file} does not hold {name}, which the index places there" for name in absent]
        regions |= {name: found[name] for name in (names or found) if name in found}
    problems = problems or _unpaired(regions)
    if problems:
        left = len(problems) - _SHOWN_PROBLEMS
        more = f"; and {left} more" if left > 0 else ""
        raise ValueError(f"model={root}: " + "; ".join(problems[:_SHOWN_PROBLEMS]) + more)
    return regions


def _tensors_of_files(root: Path) -> dict[str, list[str]]:
    """Names of the safetensors files and what the index places in them, nothing when there is no index."""
    index = root / INDEX_NAME
    if index.is_file():
        of_file: dict[str, list[str]] = {}
        for name, file in json.loads(index.read_text())["weight_map"].items():
            of_file.setdefault(file, []).append(name)
        return dict(sorted(of_file.items()))
    files = sorted(root.glob("*.safetensors"))
    if not files:
        raise ValueError(f"model={root}: no *.safetensors file found; expected a Hugging Face model directory")
    return {file.name: [] for file in files}


def _read_header(file: Path) -> dict[str, Region]:
    """Every tensor of a safetensors file; ValueError when it is missing, cut short or something else."""
    if not file.is_file():
        raise ValueError(f"{file.name} is missing")
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if size < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"{file.name} is truncated or not safetensors: {size} bytes do not hold its header")
        content = stream.read(header_bytes)
    start = 8 + header_bytes
    try:
        specs = {name: spec for name, spec in json.loads(content).items() if name != "__metadata__"}
        ends = {name: start + spec["data_offsets"][1] for name, spec in specs.items()}
        regions = {
            name: Region(file, start + spec["data_offsets"][0], tuple(spec["shape"]), _DTYPES[spec["dtype"]])
            for name, spec in specs.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file.name} has an unreadable safetensors header: {error!r}") from error
    end = max(ends.values(), default=start)
    if size != end:
        state = "truncated" if size < end else "longer than it should be"
        raise ValueError(f"{file.name} is {state}: {size} bytes on disk, its header calls for {end}")
    for name, region in regions.items():
        if ends[name] - region.offset != region.num_bytes:
            raise ValueError(f"{file.name}: {name} takes {ends[name] - region.offset} bytes, {region.shape} does not")
    return regions


def _unpaired(regions: dict[str, Region]) -> list[str]:
    scales = {name for name in regions if name.endswith(SCALE_SUFFIX)}
    weights = {name for name, region in regions.items() if region.dtype == FP8_DTYPE}
    alone = [f"{name} has no {name}{SCALE_SUFFIX}" for name in weights if name + SCALE_SUFFIX not in scales]
    alone += [f"{name} has no FP8 weight" for name in scales if name.removesuffix(SCALE_SUFFIX) not in weights]
    return sorted(alone)

"""Streams of (hf_name, weight): from a checkpoint directory, checked for duplicates, or random."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from hf_formats.file_region import FileReader, FileRegion
from hf_formats.finite import require_finite
from hf_formats.fp8 import FP8_DTYPE, SCALE_SUFFIX, Fp8Weight
from hf_formats.problems import raise_problems
from hf_formats.safetensors import read_directory
from hf_formats.stored_extras import unread_extras
from vllm.model_executor.model_loader.weight_view import Weight, WeightView


class UnreadTensor:
    """A tensor of a checkpoint, still in its file; `unread[rows, columns]` reads that slice.

    ValueError when a value of the slice is NaN or infinite.
    """

    def __init__(self, name: str, region: FileRegion, slices: FileReader) -> None:
        self.name, self._region, self._slices = name, region, slices
        self.shape, self.dtype = region.shape, region.dtype

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        parts = (*index, *[slice(None)] * (len(self.shape) - len(index)))
        ranges = tuple(part.indices(size)[:2] for part, size in zip(parts, self.shape, strict=True))
        values = self._slices.read(self.name, self._region, ranges)
        require_finite(self.name, values, str(self._region.file))
        return values


class CheckpointReader:
    """A Hugging Face directory whose weights are read by the slice; `close` it.

    The constructor reads the headers. ValueError names every file that is missing, cut short or without a tensor that
    the index places in it, with its tensors, every FP8 weight without scales, and a head that is no copy of the
    embedding to which config.json ties it. What neither engine reads (`unread_extras`) is left out.
    """

    def __init__(self, model_dir: str, tie_word_embeddings: bool = False) -> None:
        self._slices = FileReader()
        regions = read_directory(Path(model_dir))
        unread = unread_extras(Path(model_dir), regions, tie_word_embeddings)
        self._regions = {name: region for name, region in regions.items() if name not in unread}
        raise_problems(f"checkpoint {model_dir}", _unpaired(self._regions), "Fetch it again, index included.")

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read so far."""
        return self._slices.bytes_read

    def close(self) -> None:
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


def _unpaired(regions: dict[str, FileRegion]) -> list[str]:
    scales = {name for name in regions if name.endswith(SCALE_SUFFIX)}
    weights = {name for name, region in regions.items() if region.dtype == FP8_DTYPE}
    alone = [f"{name} has no {name}{SCALE_SUFFIX}" for name in weights if name + SCALE_SUFFIX not in scales]
    alone += [f"{name} has no FP8 weight" for name in scales if name.removesuffix(SCALE_SUFFIX) not in weights]
    return sorted(alone)


DUMMY_STD = 0.02


def each_once(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Pass `weights` on; ValueError for a name that comes a second time."""
    seen: set[str] = set()
    for name, tensor in weights:
        if name in seen:
            raise ValueError(f"weight {name} came twice in one update")
        seen.add(name)
        yield name, tensor


def iterate_dummy(views: dict[str, WeightView], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Values for every tensor that this rank owns: norms 1, biases 0, others normal and drawn per name, so that every
    layout gets the same model.
    """
    for name, view in views.items():
        if len(view.hf_shape) == 1:
            yield name, torch.ones(view.hf_shape) if name.endswith("norm.weight") else torch.zeros(view.hf_shape)
            continue
        if view.parameter is None:
            continue
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        yield name, torch.randn(view.hf_shape, generator=generator) * DUMMY_STD

"""Output kind: a Hugging Face directory, plain or as DeepSeek publishes (FP8 weights beside their block scales)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import torch

from hf_formats.files import write_json
from hf_formats.fp8 import FP8_DTYPE, QUANTIZATION_CONFIG, SCALE_SUFFIX, is_quantized, num_blocks
from hf_formats.safetensors import DTYPE_NAMES, INDEX_NAME
from mindspeed_llm.cli_io import copy_companions, name_end_token
from mindspeed_llm.conversion.writer import ByteSlabs, FileRecord, Form, StoredTensor
from mindspeed_llm.hf_shapes import always_fp32, packed
from mindspeed_llm.weight_plan import Shard, TensorPlan


@dataclass(frozen=True)
class HFTensor:
    """A tensor of the source as the output stores it: in ``dtype``, or in FP8 with its scales behind it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes in the output, scales included."""
        return sum(tensor.num_bytes for tensor in self.stored())

    def stored(self) -> list[StoredTensor]:
        """The weight, and its scales if it is FP8."""
        whole = tuple((0, size) for size in self.shape)
        content = TensorPlan(self.name, self.shape, "", (Shard(self.name, whole, whole),))
        form: Form = "fp8" if self.dtype == FP8_DTYPE else "plain"
        weight = StoredTensor(self.name, self.shape, self.dtype, content, form)
        if form == "plain":
            return [weight]
        blocks = tuple(map(num_blocks, self.shape))
        return [weight, StoredTensor(self.name + SCALE_SUFFIX, blocks, torch.float32, content, "fp8_scale")]


@dataclass(frozen=True)
class HFWriter:
    """``shards`` are the files in order; ``config`` is written as it is, other files are copied from ``companions``."""

    shards: tuple[tuple[HFTensor, ...], ...]
    config: Mapping[str, Any]
    companions: Path
    kind: ClassVar[str] = "hf"

    def files(self) -> Sequence[str]:
        """``model-00001-of-0000N.safetensors`` ..."""
        return list(self._shard_of)

    def tensors(self, file: str) -> Sequence[StoredTensor]:
        """Weights in order, scales behind their weights."""
        return [stored for tensor in self._shard_of[file] for stored in tensor.stored()]

    def file_bytes(self, file: str) -> int:
        tensors = self.tensors(file)
        return len(safetensors_layout(tensors)[0]) + sum(tensor.num_bytes for tensor in tensors)

    def write(self, file: str, stream: BinaryIO, slabs: Callable[[StoredTensor], ByteSlabs]) -> Mapping[str, int]:
        """One safetensors file; its header is written before the data."""
        tensors = self.tensors(file)
        prefix, offsets = safetensors_layout(tensors)
        stream.write(prefix)
        position = len(prefix)
        for tensor in tensors:
            if position != offsets[tensor.name]:
                position = stream.seek(offsets[tensor.name])
            for slab in slabs(tensor):
                stream.write(slab)
            position += tensor.num_bytes
        return offsets

    def finish(self, directory: Path, records: Mapping[str, FileRecord]) -> None:
        copy_companions(self.companions, directory)
        write_json(directory / "config.json", dict(self.config))
        name_end_token(directory)
        weight_map = {name: file for file in self.files() for name in records[file].tensors}
        total = sum(tensor.num_bytes for record in records.values() for tensor in record.tensors.values())
        write_json(directory / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})

    @cached_property
    def _shard_of(self) -> Mapping[str, tuple[HFTensor, ...]]:
        count = len(self.shards)
        return {f"model-{number + 1:05d}-of-{count:05d}.safetensors": part for number, part in enumerate(self.shards)}


def safetensors_layout(tensors: Sequence[StoredTensor]) -> tuple[bytes, dict[str, int]]:
    """(header with its length in front, tensor name -> offset in the file); wide dtypes first: all are aligned."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for tensor in sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize):
        starts[tensor.name] = end
        end += tensor.num_bytes
        offsets = [starts[tensor.name], end]
        header[tensor.name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    prefix = len(text).to_bytes(8, "little") + text
    return prefix, {name: len(prefix) + start for name, start in starts.items()}


def published(hf_name: str, shape: tuple[int, ...]) -> HFTensor:
    """A tensor as DeepSeek publishes it: FP8 or BF16, the router's correction bias in FP32."""
    if is_quantized(hf_name):
        return HFTensor(hf_name, shape, FP8_DTYPE)
    return HFTensor(hf_name, shape, torch.float32 if always_fp32(hf_name) else torch.bfloat16)


def shards_by_bytes(tensors: Iterable[HFTensor], max_shard_bytes: int) -> tuple[tuple[HFTensor, ...], ...]:
    """Consecutive tensors in files of at most ``max_shard_bytes`` of weights; a larger tensor is a file of its own."""
    return tuple(map(tuple, packed(tensors, lambda tensor: tensor.num_bytes, max_shard_bytes)))


def shards_by_count(tensors: Sequence[HFTensor], num_shards: int) -> tuple[tuple[HFTensor, ...], ...]:
    """As many tensors in each of ``num_shards`` files, give or take one; fewer files when there are fewer tensors."""
    num_shards = min(num_shards, len(tensors))
    cuts = [-(-shard * len(tensors) // num_shards) for shard in range(num_shards + 1)]
    return tuple(tuple(tensors[start:stop]) for start, stop in pairwise(cuts))


def published_config(config: Mapping[str, Any], num_mtp_layers: int) -> dict[str, Any]:
    """config.json of the form in which DeepSeek publishes."""
    kept = {key: value for key, value in config.items() if key != "dtype"}
    written = {"num_nextn_predict_layers": num_mtp_layers, "torch_dtype": "bfloat16"}
    return kept | {"quantization_config": QUANTIZATION_CONFIG} | written

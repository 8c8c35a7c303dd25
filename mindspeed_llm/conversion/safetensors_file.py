"""safetensors files whose every offset follows from names, shapes and dtypes: the header is written before the data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO

from hf_formats.safetensors import DTYPE_NAMES
from mindspeed_llm.conversion.writer import Slabs, StoredTensor

_ALIGNMENT = 8


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
    text += b" " * (-len(text) % _ALIGNMENT)
    prefix = len(text).to_bytes(8, "little") + text
    return prefix, {name: len(prefix) + start for name, start in starts.items()}


def safetensors_bytes(tensors: Sequence[StoredTensor]) -> int:
    """Size of the file."""
    return len(safetensors_layout(tensors)[0]) + sum(tensor.num_bytes for tensor in tensors)


def write_safetensors(
    stream: BinaryIO, tensors: Sequence[StoredTensor], slabs: Callable[[StoredTensor], Slabs]
) -> Mapping[str, int]:
    """Write the file; tensors are taken in their order and each put at its place. Returns the offsets."""
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

"""A GGUF file: its keys and tensors, read by the ``gguf`` package, which is imported when the first one is opened."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_CHUNK_VALUES = 16 << 20  # dequantised at a time, in fp32


@dataclass(frozen=True)
class GGUFFile:
    """keys: all of the file's metadata as Python values, floats as the shortest decimal that fp32 rounds to them.
    tensors: what gguf's reader has of each, the bytes mapped.
    """

    path: Path
    keys: dict[str, Any]
    tensors: dict[str, Any]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape in torch's order."""
        return tuple(map(int, reversed(self.tensors[name].shape)))

    def read(self, name: str, dtype: torch.dtype, index: int | None = None) -> Tensor:
        """Return a tensor, or number ``index`` of a stack, dequantised in fp32 and rounded to ``dtype``."""
        kind, shape, values = self.tensors[name].tensor_type, self.shape(name), self.tensors[name].data
        if index is not None:
            shape, values = shape[1:], values[index]
        rows = values.reshape(-1, values.shape[-1])
        whole = torch.empty(len(rows), shape[-1], dtype=dtype)
        step = max(1, _CHUNK_VALUES // shape[-1])
        for start in range(0, len(rows), step):
            chunk = np.array(library("gguf.quants").dequantize(rows[start : start + step], kind))
            whole[start : start + step] = torch.from_numpy(chunk)
        return whole.view(shape)


def open_gguf(path: Path) -> GGUFFile:
    """Read the keys of a file and where its tensors lie.

    ValueError: the ``gguf`` package is missing, the file is no whole GGUF, or it is one part of several.
    """
    try:
        reader = library("gguf").GGUFReader(path)
        keys = {name: _plain(field.contents()) for name, field in reader.fields.items()}
    except (IndexError, ValueError) as error:  # what its arrays raise about a file that is cut
        raise ValueError(f"{path} cannot be read as GGUF: {error}") from error
    if keys.get("split.count", 1) > 1:
        raise ValueError(f"{path} is one part of several; join them first: llama-gguf-split --merge FIRST OUT.gguf")
    return GGUFFile(path, keys, {tensor.name: tensor for tensor in reader.tensors})


def type_problems(file: GGUFFile) -> list[str]:
    """Return a sentence for each type of quantisation that the package cannot undo."""
    found = []
    for kind, name in {tensor.tensor_type: name for name, tensor in file.tensors.items()}.items():
        block = np.zeros((1, library("gguf").GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
        try:
            library("gguf.quants").dequantize(block, kind)
        except NotImplementedError:
            found.append(f"type {kind.name} cannot be dequantised; {name} has it")
    return found


def library(name: str) -> Any:
    """Return a module of the ``gguf`` package; ValueError where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"a GGUF file is read by the gguf package: pip install gguf==0.19.0 ({error})") from error


def _plain(value: Any) -> Any:
    return float(str(np.float32(value))) if isinstance(value, float) else value

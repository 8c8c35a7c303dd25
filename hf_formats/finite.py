"""Finds NaN and infinity in weights of any dtype, in less time than reading them takes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hf_formats.problems import shown_names

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LEAST = {  # the least magnitude, as an integer, that is infinity or NaN; float8_e4m3fn has no infinity
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7C,
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
}
_CHUNK_BYTES = {"cpu": 1 << 20, "other": 1 << 28}  # a CPU's chunk stays in its cache, a device's is worth a launch


def require_finite(name: str, tensor: Tensor, source: str) -> None:
    """Raise a ValueError that names the tensor and its ``source`` (a file) when a value is NaN or infinite.

    The bits are compared as integers: exact, at the speed of a copy, with a temporary of one chunk. Integers and
    dtypes without NaN pass.
    """
    if tensor.dtype not in _LEAST:
        return
    bits_dtype, least = _BITS[tensor.dtype.itemsize], _LEAST[tensor.dtype]
    magnitude = torch.iinfo(bits_dtype).max
    for first, part in _chunks(tensor):
        if part.numel() and int((part.view(bits_dtype) & magnitude).amax()) >= least:
            at, value = _first_bad(part, first, tensor.shape)
            raise ValueError(
                f"weight {name} of {source} is {value} at {at}; weights must be finite: fetch or make the file again, "
                "or take an earlier checkpoint"
            )


def note_finite(are_finite: list[tuple[str, Tensor]], name: str, tensor: Tensor) -> None:
    """Append whether a weight has no NaN or infinity; on a device the host waits once, in `require_noted`."""
    if tensor.dtype in _LEAST and tensor.numel() and not tensor.is_meta:
        are_finite.append((name, _is_finite(tensor)))


def require_noted(are_finite: list[tuple[str, Tensor]], source: str) -> None:
    """Raise a ValueError that names every noted weight that is not finite, and its ``source``."""
    if not are_finite or bool(torch.stack([flag for _, flag in are_finite]).all()):
        return
    names = list(dict.fromkeys(name for name, is_finite in are_finite if not is_finite))
    raise ValueError(
        f"{source} has NaN or infinity in {shown_names(names)}; weights must be finite: go on from a checkpoint "
        "before the step that broke them, with a lower learning rate or clip_grad"
    )


def _is_finite(tensor: Tensor) -> Tensor:
    """Return a bool on the tensor's device. Accelerators compare floats: not all have the integer operations."""
    bits_dtype, least = _BITS[tensor.dtype.itemsize], _LEAST[tensor.dtype]
    magnitude = torch.iinfo(bits_dtype).max
    if tensor.is_cpu:
        return torch.stack([(part.view(bits_dtype) & magnitude).amax() < least for _, part in _chunks(tensor)]).all()
    is_wide = tensor.dtype.itemsize > 1
    return torch.stack([(part if is_wide else part.float()).isfinite().all() for _, part in _chunks(tensor)]).all()


def _chunks(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (number of the first element, contiguous flat elements) of parts of at most a chunk, or a row if longer."""
    limit = _CHUNK_BYTES["cpu" if tensor.is_cpu else "other"] // tensor.dtype.itemsize
    if tensor.is_contiguous():
        step, whole = limit, tensor.view(-1)
    else:
        step, whole = max(1, limit // max(1, tensor[0].numel())), tensor
    first = 0
    for part in whole.split(step):
        yield first, part.reshape(-1)
        first += part.numel()


def _first_bad(part: Tensor, first: int, shape: torch.Size) -> tuple[tuple[int, ...], float]:
    values = part.to(torch.float64)
    index = int((~torch.isfinite(values)).nonzero()[0])
    number, at = first + index, []
    for size in reversed(shape):
        number, place = divmod(number, size)
        at.append(place)
    return tuple(reversed(at)), float(values[index])

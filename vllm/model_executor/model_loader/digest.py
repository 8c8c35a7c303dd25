"""Checksums of weights that add up over slices, so that engines which cut a tensor differently can compare it.

    digest(W) = sum_ij r_i bits(W_ij) c_j  mod 2^64

r and c are fixed pseudo-random odd numbers, bits(x) is the memory of x as a signed integer, and a vector counts as one
column. A single wrong element always shows, any other difference but for one chance in about 2^32.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_CHUNK_ELEMENTS = 1 << 20  # of a tensor, widened to 8 bytes at a time
_ROW_SALT, _COLUMN_SALT = 1, 2


class WeightDigest(NamedTuple):
    """What identifies a whole tensor under its Hugging Face name."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    value: int  # in [0, 2^64)


def slice_digest(part: Tensor, starts: tuple[int, ...]) -> Tensor:
    """int64 scalar on the part's device: what whole_tensor[starts : starts + part.shape] adds to its digest.

    part: one or two dimensions, any strides.
    """
    bits = part.detach().view(_BITS[part.element_size()])
    if bits.dim() == 1:
        bits, starts = bits[:, None], (*starts, 0)
    rows, columns = bits.shape
    r = _coefficients(_ROW_SALT, starts[0], rows, part.device)
    c = _coefficients(_COLUMN_SALT, starts[1], columns, part.device)
    step = max(1, _CHUNK_ELEMENTS // max(1, columns))
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    for first in range(0, rows, step):
        chunk = bits[first : first + step].to(torch.int64)
        total += (chunk.mul_(c).sum(1) * r[first : first + step]).sum()
    return total


def digest(tensor: Tensor) -> WeightDigest:
    """Of a whole tensor."""
    value = int(slice_digest(tensor, (0,) * tensor.dim()))
    return WeightDigest(tuple(tensor.shape), tensor.dtype, value % 2**64)


def differences(expected: dict[str, WeightDigest], found: dict[str, WeightDigest]) -> list[str]:
    """One sentence for each name whose digests differ or that only one side has, in the order of `expected`."""
    names: Iterable[str] = [*expected, *(name for name in found if name not in expected)]
    problems = []
    for name in names:
        one, other = expected.get(name), found.get(name)
        if one is None or other is None:
            problems.append(f"{name} is {'not expected' if one is None else 'missing'}")
        elif one != other:
            problems.append(f"{name}: {_text(other)}, expected {_text(one)}")
    return problems


def _text(digest: WeightDigest) -> str:
    return f"{str(digest.dtype).removeprefix('torch.')} {list(digest.shape)} {digest.value:016x}"


def _coefficients(salt: int, start: int, count: int, device: torch.device) -> Tensor:
    """int64 [count] on the device, of the positions from `start` on."""
    size = 1 << max(12, (start + count - 1).bit_length())
    return torch.from_numpy(_table(salt, size)[start : start + count]).to(device)


@lru_cache(maxsize=32)
def _table(salt: int, size: int) -> np.ndarray:
    """Odd numbers int64 [size]: splitmix64 of the position."""
    with np.errstate(over="ignore"):
        x = (np.arange(size, dtype=np.uint64) + np.uint64(salt << 40)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((x ^ (x >> np.uint64(31))) | np.uint64(1)).view(np.int64)

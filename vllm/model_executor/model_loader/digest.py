"""Checksums of weights that add up over slices, so that engines which cut a tensor differently can compare it.

    digest(W) = sum_p r_p sum_qb c_qb byte_b(W_pq)  mod 2^64

q runs along the tensor's `inner_dim`, p along the other dimension, b over the bytes of an element; a vector counts as
one p, bytes are signed. r are fixed pseudo-random odd numbers of 64 bits, c of 8 bits and never 0: the inner sum is a
product of 8-bit integers, as quick as the memory is.

A single wrong byte always shows; so does any other difference, but for the chance that c makes the sum of every p that
it touches come out the same: about 1 in 100 for two bytes next to each other, nothing for a misplaced row or column.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_CHUNK_BYTES = 1 << 20  # of a slice, worked on at a time: it stays in a core's cache
_MAX_INNER_BYTES = 1 << 16  # whose products fit in 32 bits
_OUTER_SALT, _INNER_SALT = 1, 2
# The engine keeps [in, out] in memory of what goes into products (`empty_matrix`), [out, in] of the rest.
_OUTPUTS_TOGETHER = re.compile(r".*(?<!\.kv_b)_proj(_with_mqa)?\.weight")


class WeightDigest(NamedTuple):
    """What identifies a tensor, or the slice of one, under its Hugging Face name."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    value: int  # in [0, 2^64)


@lru_cache(maxsize=1 << 17)
def inner_dim(hf_name: str) -> int:
    """The dimension of a weight in which the engine keeps neighbours together in memory."""
    return 0 if _OUTPUTS_TOGETHER.fullmatch(hf_name) else -1


def slice_digest(hf_name: str, part: Tensor, starts: tuple[int, ...]) -> Tensor:
    """int64 scalar on the part's device: what whole_tensor[starts : starts + part.shape] adds to its digest.

    part: one or two dimensions, any strides; quickest when elements lie together in the inner dimension.
    """
    part = part.detach()
    if part.dim() == 1:
        part, starts = part[None], (0, *starts)
    elif inner_dim(hf_name) == 0:
        part, starts = part.T, starts[::-1]
    num_rows, num_columns = part.shape
    size = part.element_size()
    r_P = _outer_coefficients(starts[0], num_rows, part.device)
    c_QB = _inner_coefficients(starts[1] * size, num_columns * size, part.device).view(num_columns, size)
    sums = []
    width = _MAX_INNER_BYTES // size
    for column in range(0, num_columns, width):
        band = part[:, column : column + width]
        step = max(1, _CHUNK_BYTES // (band.shape[1] * size))
        for row in range(0, num_rows, step):
            sums_P = _inner_sums(band[row : row + step], c_QB[column : column + width])
            sums.append((sums_P * r_P[row : row + step]).sum())
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def _inner_sums(part_PQ: Tensor, c_QB: Tensor) -> Tensor:
    """[P]: sum_qb c_qb byte_b(part_pq), in int32 or int64."""
    if part_PQ.stride(1) != 1 and part_PQ.stride(0) == 1:
        bytes_QPB = part_PQ.T.view(torch.int8)
        sums_BPB = _product(c_QB.T, bytes_QPB).view(c_QB.shape[1], len(part_PQ), -1)
        return sums_BPB.diagonal(dim1=0, dim2=2).sum(1)
    if part_PQ.stride(1) != 1:
        part_PQ = torch.empty(part_PQ.shape, dtype=part_PQ.dtype, device=part_PQ.device).copy_(part_PQ)
    return _product(part_PQ.view(torch.int8), c_QB.reshape(-1, 1)).squeeze(1)


def _product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """[M, N] of 8-bit integers, exact."""
    if a_MK.device.type == "cpu":
        return torch._int_mm(_plain(a_MK), _plain(b_KN))
    # Accelerators have no such product, or one for some shapes only; M or N is a few.
    if b_KN.shape[1] == 1:
        return (a_MK.to(torch.int32) * b_KN.T.to(torch.int32)).sum(1, keepdim=True)
    rows = [(b_KN.to(torch.int32) * a_K[:, None].to(torch.int32)).sum(0) for a_K in a_MK]
    return torch.stack(rows)


def _plain(matrix: Tensor) -> Tensor:
    """The matrix with rows that do not share memory: of one row or column, torch allows any stride, the product not."""
    is_plain = matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1]
    return matrix if is_plain else matrix.clone(memory_format=torch.contiguous_format)


def digest(hf_name: str, tensor: Tensor) -> WeightDigest:
    """Of a whole tensor."""
    value = int(slice_digest(hf_name, tensor, (0,) * tensor.dim()))
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


def _outer_coefficients(start: int, count: int, device: torch.device) -> Tensor:
    """Odd numbers int64 [count], of the positions from `start` on."""
    return _table(_OUTER_SALT, _table_size(start + count), device)[start : start + count]


def _inner_coefficients(start: int, count: int, device: torch.device) -> Tensor:
    """int8 [count] without 0, of the positions from `start` on."""
    return _inner_table(_table_size(start + count), device)[start : start + count]


def _table_size(count: int) -> int:
    return 1 << max(12, (count - 1).bit_length())


@lru_cache(maxsize=64)
def _inner_table(size: int, device: torch.device) -> Tensor:
    bits = (_table(_INNER_SALT, size, torch.device("cpu")) >> 40) & 0xFF
    return torch.where(bits == 0, 1, bits).to(torch.uint8).view(torch.int8).to(device)


@lru_cache(maxsize=64)
def _table(salt: int, size: int, device: torch.device) -> Tensor:
    """Odd numbers int64 [size]: splitmix64 of the position."""
    with np.errstate(over="ignore"):
        x = (np.arange(size, dtype=np.uint64) + np.uint64(salt << 40)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return torch.from_numpy(((x ^ (x >> np.uint64(31))) | np.uint64(1)).view(np.int64)).to(device)

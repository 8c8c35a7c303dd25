"""Checksums of weights that add up over slices, so that engines which cut a tensor differently can compare it.

    digest(W) = sum_p r_p sum_qb c_qb byte_b(W_pq)  mod 2^64

q runs along the tensor's `inner_dim`, p along the other dimension, b over the bytes of an element; a vector counts as
one p. r are fixed pseudo-random odd numbers of 64 bits, c of 8 bits, signed and never 0: the inner sum is a product of
8-bit integers. On CPUs loops of our kernels take it on the way of a copy, for little more than the copy's
time; torch where there is no compiler, and on accelerators.

A single wrong byte always shows; so does any other difference, but for the chance that c makes the sum of every p that
it touches come out the same: about 1 in 100 for two bytes next to each other, nothing for a misplaced row or column.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm.ops.cpu.build import kernels, kernels_problem
from vllm.v1.sample.rng import GOLDEN, splitmix64

_HOST_PIECE_BYTES = 1 << 20  # read at a time, so that they stay in a core's caches
_DEVICE_PIECE_BYTES = 64 << 20  # a launch costs an accelerator's host some 10 us; widened, these are 256 MiB
_MAX_INNER_BYTES = 1 << 16  # whose products fit in 32 bits
_OUTER_SALT, _INNER_SALT = 1, 2
_BYTES_OF_R = 8
_CPU = torch.device("cpu")
# Trainers keep [in, out] in memory of routed experts, for grouped products, and [out, in] of the rest.
_OUTPUTS_TOGETHER = re.compile(r".*\.mlp\.experts\.\d+\.\w+_proj\.weight")


class WeightDigest(NamedTuple):
    """What identifies a tensor, or the slice of one, under its Hugging Face name."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    value: int  # in [0, 2^64)


@lru_cache(maxsize=1 << 17)
def inner_dim(hf_name: str) -> int:
    """The dimension of a weight in which trainers keep neighbours together in memory.

    A name says it, so that all sides agree: rollout engines may differ, by their processors too.
    """
    return 0 if _OUTPUTS_TOGETHER.fullmatch(hf_name) else -1


def slice_digest(hf_name: str, part: Tensor, starts: tuple[int, ...]) -> Tensor:
    """int64 scalar on the part's device: what whole_tensor[starts : starts + part.shape] adds to its digest."""
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    add_digest(total, hf_name, part, starts)
    return total


def add_digest(total: Tensor, hf_name: str, part: Tensor, starts: tuple[int, ...]) -> None:
    """total += slice_digest(hf_name, part, starts), all on one device.

    part: one or two dimensions, any strides; quickest when elements lie together in one of them.
    """
    if part.is_meta:  # without values, of which a digest would be
        return
    part_PQ = _as_rows(hf_name, part)
    if part_PQ.stride(1) != 1 and part_PQ.stride(0) != 1:
        part_PQ = part_PQ.clone(memory_format=torch.contiguous_format)
    native = _native() if part.is_cpu else None
    if native is None:
        total += _torch_digest(part_PQ, *_coefficients(hf_name, part_PQ, starts))
        return
    (rows, columns), (along_p, along_q), size = part_PQ.shape, part_PQ.stride(), part_PQ.element_size()
    is_across = along_q != 1
    stride = (along_q if is_across else along_p) * size
    factors = _factors(hf_name, part_PQ, starts)
    native.cpu_digest(total.data_ptr(), part_PQ.data_ptr(), size, int(is_across), stride, rows, columns, *factors)


def copy_with_digests(
    hf_name: str,
    target: Tensor,
    values: Tensor,
    starts: tuple[int, ...],
    *,
    of_values: Tensor | None = None,
    of_target: Tensor | None = None,
    of_values_dtype: torch.dtype | None = None,
) -> None:
    """target.copy_(values), whose first element is `starts` of the whole, and `add_digest` to one total or both.

    On CPUs a piece at a time, which is in the cache when it is read again, and also where the orders of memory differ.

    Args:
        of_values: gets the digest of the values as they are read, in `of_values_dtype`, by default the target's.
        of_target: gets that of the target, read from its memory once the values are there.
    """
    if of_values is None and of_target is None:
        target.copy_(values)
        return
    dtype = target.dtype if of_values is None else of_values_dtype or target.dtype
    to_PQ, from_PQ = _as_rows(hf_name, target), _as_rows(hf_name, values)
    native = _native() if target.is_cpu and values.is_cpu and target.dtype == values.dtype == dtype else None
    is_turned = to_PQ.stride(1) != 1
    if native is None or from_PQ.stride(1) != 1 or (is_turned and to_PQ.stride(0) != 1):
        dim = 1 if inner_dim(hf_name) == 0 else 0
        first, num_rows = list(starts), max(1, _piece_bytes(values.device) * values.shape[dim] // values.nbytes)
        for source, copied in zip(values.split(num_rows, dim), target.split(num_rows, dim), strict=True):
            copied.copy_(source)
            if of_values is not None:
                add_digest(of_values, hf_name, source.to(dtype), tuple(first))
            if of_target is not None:
                add_digest(of_target, hf_name, copied, tuple(first))
            first[dim] += source.shape[dim]
        return
    size = target.element_size()
    native.cpu_copy_digest(
        None if of_values is None else of_values.data_ptr(),
        None if of_target is None else of_target.data_ptr(),
        from_PQ.data_ptr(),
        to_PQ.data_ptr(),
        from_PQ.stride(0) * size,
        to_PQ.stride(int(is_turned)) * size,
        *to_PQ.shape,
        size,
        int(is_turned),
        *_factors(hf_name, to_PQ, starts),
    )


def _as_rows(hf_name: str, part: Tensor) -> Tensor:
    """[P, Q]"""
    part = part.detach()
    if part.dim() == 1:
        return part[None]
    return part.T if inner_dim(hf_name) == 0 else part


def _first_places(hf_name: str, starts: tuple[int, ...]) -> tuple[int, int]:
    """p and q of the slice's first element."""
    if len(starts) == 1:
        return 0, starts[0]
    return (starts[1], starts[0]) if inner_dim(hf_name) == 0 else (starts[0], starts[1])


def _coefficients(hf_name: str, part_PQ: Tensor, starts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """r int64 [P], c [Q, bytes of an element]."""
    (first_row, first_column), device = _first_places(hf_name, starts), part_PQ.device
    (num_rows, num_columns), size = part_PQ.shape, part_PQ.element_size()
    first_byte, stop = first_column * size, (first_column + num_columns) * size
    c_QB = _inner_table(_table_size(stop), device)[first_byte:stop].view(num_columns, size)
    return odd_numbers(_OUTER_SALT, _table_size(first_row + num_rows), device)[first_row : first_row + num_rows], c_QB


def _factors(hf_name: str, part_PQ: Tensor, starts: tuple[int, ...]) -> tuple[int, int]:
    """Addresses of `_coefficients`, without a tensor on the way: experts are many and small."""
    (rows, columns), size = part_PQ.shape, part_PQ.element_size()
    first_row, first_column = _first_places(hf_name, starts)
    c = _inner_table(_table_size((first_column + columns) * size), _CPU).data_ptr() + first_column * size
    return c, odd_numbers(_OUTER_SALT, _table_size(first_row + rows), _CPU).data_ptr() + first_row * _BYTES_OF_R


@cache
def _native() -> ctypes.CDLL | None:
    return kernels() if kernels_problem() is None else None


def _torch_digest(part_PQ: Tensor, r_P: Tensor, c_QB: Tensor) -> Tensor:
    num_rows, num_columns = part_PQ.shape
    total = torch.zeros((), dtype=torch.int64, device=part_PQ.device)
    width = max(1, _MAX_INNER_BYTES // part_PQ.element_size())
    for column in range(0, num_columns, width):
        c_WB = c_QB[column : column + width]
        step = max(1, _piece_bytes(part_PQ.device) // c_WB.numel())
        for row in range(0, num_rows, step):
            tile = part_PQ[row : row + step, column : column + width]
            total += (_inner_sums(tile, c_WB) * r_P[row : row + step]).sum()
    return total


def _inner_sums(part_PQ: Tensor, c_QB: Tensor) -> Tensor:
    """int32 [P]: sum_qb c_qb byte_b(part_pq)."""
    if part_PQ.stride(1) == 1:
        return part_PQ.view(torch.uint8).to(torch.int32).mul_(c_QB.flatten()).sum(1, dtype=torch.int32)
    bytes_QPB = part_PQ.T.view(torch.uint8).view(len(c_QB), len(part_PQ), -1).to(torch.int32)
    return bytes_QPB.mul_(c_QB[:, None]).sum((0, 2), dtype=torch.int32)


def digest(hf_name: str, tensor: Tensor) -> WeightDigest:
    """The digest of a whole tensor."""
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


def _table_size(count: int) -> int:
    return 1 << max(12, (count - 1).bit_length())


def _piece_bytes(device: torch.device) -> int:
    """How many bytes of a weight are read at a time there."""
    return _HOST_PIECE_BYTES if device.type == "cpu" else _DEVICE_PIECE_BYTES


@lru_cache(maxsize=64)
def _inner_table(size: int, device: torch.device) -> Tensor:
    """int8 on the host, whose loops read it; int32 on accelerators, of which Ascend's cores do not cast int8."""
    bits = (odd_numbers(_INNER_SALT, size, _CPU) >> 40) & 0xFF
    c = torch.where(bits == 0, 1, bits).to(torch.uint8).view(torch.int8)
    return c if device.type == "cpu" else c.to(torch.int32).to(device)


@lru_cache(maxsize=64)
def odd_numbers(salt: int, size: int, device: torch.device) -> Tensor:
    """Pseudo-random int64 [size], others for each salt: splitmix64 of the position."""
    positions = np.arange(size, dtype=np.uint64) + np.uint64(salt << 40)
    numbers = splitmix64((positions - np.uint64(1)) * GOLDEN) | np.uint64(1)
    return torch.from_numpy(numbers.view(np.int64)).to(device)

"""Checksums of weights that add up over slices, so that engines which cut a tensor differently can compare it.

    digest(W) = sum_pq r_p 2^(b (q mod 64/b)) c_(q div 64/b) bits(W_pq)  mod 2^64

q runs along the tensor's `word_dim`, p along the other dimension, a vector counts as one p; bits(x) is the memory of x
as an unsigned integer of b bits, r and c are fixed pseudo-random odd numbers. Elements that lie together in memory are
so read as words of 8 bytes: sum_pw r_p c_w word_pw, as quick as the memory is.

A single wrong element always shows. Any other difference shows but for one chance in 2^64, in 2^b when all of its
elements are the last ones of their words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_WORD_BYTES = 8
_UNSIGNED = {1: (torch.uint8, 0xFF), 2: (torch.int16, 0xFFFF), 4: (torch.int32, 0xFFFFFFFF)}
_CHUNK_BYTES = 1 << 20  # of a slice, worked on at a time: it stays in a core's cache
_ROW_SALT, _WORD_SALT = 1, 2
# The engine keeps [in, out] in memory of what goes into products (`empty_matrix`), [out, in] of the rest.
_OUTPUTS_TOGETHER = re.compile(r".*(?<!\.kv_b)_proj(_with_mqa)?\.weight")


class WeightDigest(NamedTuple):
    """What identifies a tensor, or the slice of one, under its Hugging Face name."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    value: int  # in [0, 2^64)


def word_dim(hf_name: str) -> int:
    """The dimension of a weight whose neighbours share a word: the one in which the engine keeps them together."""
    return 0 if _OUTPUTS_TOGETHER.fullmatch(hf_name) else -1


def slice_digest(hf_name: str, part: Tensor, starts: tuple[int, ...]) -> Tensor:
    """int64 scalar on the part's device: what whole_tensor[starts : starts + part.shape] adds to its digest.

    part: one or two dimensions, any strides; quick when it holds whole words that lie together in memory.
    """
    part = part.detach()
    if part.dim() == 1:
        part, starts = part[None], (0, *starts)
    elif word_dim(hf_name) == 0:
        part, starts = part.T, starts[::-1]
    num_rows, num_columns = part.shape
    per_word = _WORD_BYTES // part.element_size()
    r = _coefficients(_ROW_SALT, starts[0], num_rows, part.device)
    has_whole_words = starts[1] % per_word == 0 and num_columns % per_word == 0
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    if part.numel() == 0:
        return total
    step = max(1, _CHUNK_BYTES // (num_columns * part.element_size()))
    for first in range(0, num_rows, step):
        rows = part[first : first + step]
        sums = _sums_of_words(rows, starts[1]) if has_whole_words else _sums_of_elements(rows, starts[1])
        total += (sums * r[first : first + step]).sum()
    return total


def _sums_of_words(rows_PQ: Tensor, start: int) -> Tensor:
    """int64 [P]: sum_w c_w word_pw."""
    per_word = _WORD_BYTES // rows_PQ.element_size()
    lie_together = rows_PQ.stride(1) == 1 and rows_PQ.stride(0) % per_word == 0
    if not (lie_together and rows_PQ.storage_offset() % per_word == 0):
        rows_PQ = torch.empty(rows_PQ.shape, dtype=rows_PQ.dtype, device=rows_PQ.device).copy_(rows_PQ)
    words_PW = rows_PQ.view(torch.int64)
    c_W = _coefficients(_WORD_SALT, start // per_word, words_PW.shape[1], words_PW.device)
    if words_PW.device.type == "cpu":
        return torch.mv(words_PW, c_W)  # of integers no accelerator has it
    return (words_PW * c_W).sum(1)


def _sums_of_elements(rows_PQ: Tensor, start: int) -> Tensor:
    """`_sums_of_words` of rows that begin or end within a word."""
    size = rows_PQ.element_size()
    per_word = _WORD_BYTES // size
    dtype, mask = _UNSIGNED[size]
    count = rows_PQ.shape[1]
    first = start // per_word
    position_Q = torch.arange(start, start + count, device=rows_PQ.device)
    c_W = _coefficients(_WORD_SALT, first, (start + count - 1) // per_word - first + 1, rows_PQ.device)
    c_Q = c_W[position_Q // per_word - first] << (position_Q % per_word * 8 * size)
    return ((rows_PQ.view(dtype).to(torch.int64) & mask) * c_Q).sum(1)


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


def _coefficients(salt: int, start: int, count: int, device: torch.device) -> Tensor:
    """int64 [count] on the device, of the positions from `start` on."""
    size = 1 << max(12, (start + count - 1).bit_length())
    return _table(salt, size, device)[start : start + count]


@lru_cache(maxsize=64)
def _table(salt: int, size: int, device: torch.device) -> Tensor:
    """Odd numbers int64 [size]: splitmix64 of the position."""
    with np.errstate(over="ignore"):
        x = (np.arange(size, dtype=np.uint64) + np.uint64(salt << 40)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return torch.from_numpy(((x ^ (x >> np.uint64(31))) | np.uint64(1)).view(np.int64)).to(device)

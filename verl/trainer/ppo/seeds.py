"""Sampling seeds that depend only on what is sampled, not on where or when."""

from __future__ import annotations

import numpy as np

_MASK = (1 << 64) - 1


def sampling_seeds(base: int, stream: int, first_row: int, num_rows: int) -> np.ndarray:
    """One seed per row, Python integers [num_rows] in [0, 2^63): a splitmix64 hash of (base, stream, row).

    ``stream`` is the global step for training and a negative number for validation, so that a resumed run, or one
    with another number of devices, samples what the original would have.
    """
    start = _splitmix64(_splitmix64(base & _MASK) ^ (stream & _MASK))
    seeds = [_splitmix64(start ^ row) >> 1 for row in range(first_row, first_row + num_rows)]
    return np.array(seeds, dtype=object)


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)

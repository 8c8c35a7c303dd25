"""Products of rows that come sorted by expert with their expert's matrix.

How many tiles of rows an expert has is known on the device alone. There are as many programs as there can be tiles:
those beyond do nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm.ops.cuda.kernels.arithmetic import dot, rounded


@triton.jit
def grouped_product(
    x: tl.tensor,  # [S, I], contiguous
    weight: tl.tensor,  # [E, O, I]
    stride_E: tl.tensor,
    stride_O: tl.tensor,
    stride_I: tl.tensor,
    ends: tl.tensor,  # int32 [E]: where the rows of each expert end
    out: tl.tensor,  # [S, O], contiguous
    E: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    I: tl.constexpr,  # noqa: E741
    TILE_E: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_O: tl.constexpr,
    TILE_I: tl.constexpr,
) -> None:
    expert, first, stop = expert_of_tile(ends, tl.program_id(0), E, TILE_E, TILE_S)
    if expert >= E:
        return
    row = first + tl.arange(0, TILE_S)
    column, i = tl.program_id(1) * TILE_O + tl.arange(0, TILE_O), tl.arange(0, TILE_I)
    is_row, is_column, row_S1 = row[:, None] < stop, column[None, :] < O, row.to(tl.int64)[:, None]
    weight_at = weight + expert.to(tl.int64) * stride_E + column.to(tl.int64)[None, :] * stride_O
    sum_SO = tl.zeros([TILE_S, TILE_O], tl.float32)
    for begin in range(0, I, TILE_I):
        channel = begin + i
        x_SI = tl.load(x + row_S1 * I + channel[None, :], mask=is_row & (channel[None, :] < I), other=0.0)
        weight_IO_at = weight_at + channel[:, None] * stride_I
        weight_IO = tl.load(weight_IO_at, mask=is_column & (channel[:, None] < I), other=0.0)
        sum_SO = dot(x_SI, weight_IO, sum_SO)
    tl.store(out + row_S1 * O + column[None, :], rounded(sum_SO, out.dtype.element_ty), mask=is_row & is_column)


@triton.jit
def expert_of_tile(
    ends: tl.tensor, tile: tl.tensor, E: tl.constexpr, TILE_E: tl.constexpr, TILE_S: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The expert of a tile of rows (E: of none), the tile's first row, and where the expert's rows end."""
    e = tl.arange(0, TILE_E)
    end_E = tl.load(ends + e, mask=e < E, other=0)
    start_E = tl.load(ends + e - 1, mask=(e > 0) & (e < E), other=0)
    tiles_E = tl.where(e < E, (end_E - start_E + TILE_S - 1) // TILE_S, 0)
    expert = tl.sum((tl.cumsum(tiles_E, 0) <= tile).to(tl.int32), 0)
    first_tile = tl.sum(tl.where(e < expert, tiles_E, 0), 0)
    start = tl.sum(tl.where(e == expert, start_E, 0), 0)
    stop = tl.sum(tl.where(e == expert, end_E, 0), 0)
    return expert, start + (tile - first_tile) * TILE_S, stop

"""Products of e4m3 activations with e4m3 weights in 128 x 128 blocks, and what makes activations e4m3.

Tensor cores add the products of one block of 128 channels; its two scales are applied in float32 and the blocks are
added there (vllm/ops/reference_fp8.py). The outputs' channels are the rows of a tensor core's tile and tokens its
columns, because rows come by 64 and columns by 8: a decode step has few tokens. C counts blocks of 128 channels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm.ops.cuda.kernels.arithmetic import dot, rounded
from vllm.ops.cuda.kernels.grouped import expert_of_tile

BLOCK: tl.constexpr = tl.constexpr(128)
FP8_MAX: tl.constexpr = tl.constexpr(448.0)
SMALLEST_NORMAL: tl.constexpr = tl.constexpr(1.1754943508222875e-38)
TILES_BESIDE: tl.constexpr = tl.constexpr(8)  # tiles of tokens whose programs start together and read the same weights


@triton.jit
def quantize_rows(
    x: tl.tensor,  # [T, I]
    x_stride: tl.tensor,
    values: tl.tensor,  # e4m3 [T, I], contiguous
    scales: tl.tensor,  # fp32 [C, T], contiguous
    T: tl.tensor,
    C: tl.constexpr,
    TILE_C: tl.constexpr,
) -> None:
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    channel_CI = c[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x_CI = tl.load(x + row * x_stride + channel_CI, mask=c[:, None] < C, other=0.0).to(tl.float32)
    _write_quantized(x_CI, values + row * (C * BLOCK) + channel_CI, scales + c.to(tl.int64) * T + row, c < C)


@triton.jit
def silu_and_mul_quantized(
    x: tl.tensor,  # [T, 2F], contiguous
    num_rows: tl.tensor,  # int32, one number on the device: rows from there on are left out
    values: tl.tensor,  # e4m3 [T, F], contiguous
    scales: tl.tensor,  # fp32 [C, T], contiguous
    T: tl.tensor,
    C: tl.constexpr,
    TILE_C: tl.constexpr,
) -> None:
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    if row >= tl.load(num_rows):
        return
    channel_CI = c[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    gate_at, is_in = x + row * (2 * C * BLOCK) + channel_CI, c[:, None] < C
    gate_CI = tl.load(gate_at, mask=is_in, other=0.0).to(tl.float32)
    up_CI = tl.load(gate_at + C * BLOCK, mask=is_in, other=0.0).to(tl.float32)
    silu_CI = rounded(gate_CI / (1.0 + tl.exp(-gate_CI)), x.dtype.element_ty).to(tl.float32)
    product_CI = rounded(silu_CI * up_CI, x.dtype.element_ty).to(tl.float32)
    _write_quantized(product_CI, values + row * (C * BLOCK) + channel_CI, scales + c.to(tl.int64) * T + row, c < C)


@triton.jit
def _write_quantized(x_CI: tl.tensor, values_at: tl.tensor, scales_at: tl.tensor, is_in_C: tl.tensor) -> None:
    scale_C = tl.div_rn(tl.max(tl.abs(x_CI), 1), tl.full([x_CI.shape[0]], FP8_MAX, tl.float32))
    scale_C = tl.where(scale_C < SMALLEST_NORMAL, 1.0, scale_C)
    scaled_CI = tl.div_rn(x_CI, tl.broadcast_to(scale_C[:, None], x_CI.shape))
    scaled_CI = tl.minimum(tl.maximum(scaled_CI, -FP8_MAX), FP8_MAX)
    tl.store(values_at, rounded(scaled_CI, values_at.dtype.element_ty), mask=is_in_C[:, None])
    tl.store(scales_at, scale_C, mask=is_in_C)


@triton.jit
def _tiles_of(
    ends: tl.tensor,
    T: tl.tensor,
    tiles_T: tl.tensor,
    HAS_EXPERTS: tl.constexpr,
    E: tl.constexpr,
    TILE_E: tl.constexpr,
    TILE_T: tl.constexpr,
    TILES_O: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """This program's expert (E: none), its first row and where its expert's rows end, and its tile of outputs."""
    program = tl.program_id(0)
    first_tile = program // (TILES_BESIDE * TILES_O) * TILES_BESIDE
    beside = tl.minimum(tiles_T - first_tile, TILES_BESIDE)
    within = program % (TILES_BESIDE * TILES_O)
    tile, tile_O = first_tile + within % beside, within // beside
    expert, start, stop = tile * 0, tile * TILE_T, T
    if HAS_EXPERTS:
        expert, start, stop = expert_of_tile(ends, tile, E, TILE_E, TILE_T)
    return expert, start, stop, tile_O


@triton.jit
def block_product(
    x: tl.tensor,  # e4m3 [X, I], contiguous
    x_scales: tl.tensor,  # fp32 [C, X], contiguous
    X: tl.tensor,
    rows: tl.tensor,  # int64 [T]: the row of x that each row of the product takes
    weight: tl.tensor,  # e4m3 [E, O, I], contiguous
    scales: tl.tensor,  # fp32 [E, R, C], contiguous
    row_blocks: tl.tensor,  # int64 [O]: the row of scales that each output takes
    R: tl.tensor,
    ends: tl.tensor,  # int32 [E]: where the rows of each expert end
    out: tl.tensor,  # [T, O], or fp32 [SPLITS, T, O]; contiguous
    T: tl.tensor,
    tiles_T: tl.tensor,
    HAS_ROWS: tl.constexpr,  # otherwise X = T
    HAS_EXPERTS: tl.constexpr,  # otherwise E = 1, and all rows are its
    E: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    C: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE_E: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_O: tl.constexpr,
) -> None:
    split = tl.program_id(1)
    expert, start, stop, tile_O = _tiles_of(ends, T, tiles_T, HAS_EXPERTS, E, TILE_E, TILE_T, tl.cdiv(O, TILE_O))
    if expert >= E:
        return
    first_output = expert.to(tl.int64) * O
    t, output, i = tl.arange(0, TILE_T), tile_O * TILE_O + tl.arange(0, TILE_O), tl.arange(0, BLOCK)
    is_row, is_output = start + t < stop, output < O
    # What lies outside is computed from a row and an output inside, and not stored: loads need no masks.
    row, o = (start + tl.where(is_row, t, 0)).to(tl.int64), tl.where(is_output, output, O - 1)
    source = tl.load(rows + row) if HAS_ROWS else row
    x_at = x + source[:, None] * (C * BLOCK) + i[None, :]
    weight_at = weight + first_output * (C * BLOCK) + o[:, None] * (C * BLOCK) + i[None, :]
    scale_at = scales + (expert * R + tl.load(row_blocks + o).to(tl.int32)) * C
    x_scale_at = x_scales + source
    per_split: tl.constexpr = (C + SPLITS - 1) // SPLITS
    sum_OT = tl.zeros([TILE_O, TILE_T], tl.float32)
    for block in range(split * per_split, tl.minimum(C, (split + 1) * per_split)):
        x_TI, weight_OI = tl.load(x_at + block * BLOCK), tl.load(weight_at + block * BLOCK)
        scale_O, scale_T = tl.load(scale_at + block), tl.load(x_scale_at + block * X)
        products_OT = dot(weight_OI, tl.trans(x_TI), tl.zeros([TILE_O, TILE_T], tl.float32))
        sum_OT += products_OT * scale_O[:, None] * scale_T[None, :]
    out_at = out + (split * T + start).to(tl.int64) * O + t[None, :] * O + output[:, None]
    tl.store(out_at, rounded(sum_OT, out.dtype.element_ty), mask=is_row[None, :] & is_output[:, None])


@triton.jit
def wide_product(
    x: tl.tensor,
    x_scales: tl.tensor,
    X: tl.tensor,
    rows: tl.tensor,
    weight: tl.tensor,  # a descriptor of tiles [128, 128] of [E * O, I]
    scales: tl.tensor,
    row_blocks: tl.tensor,  # not read: output o takes row o // 128 of the scales
    R: tl.tensor,
    ends: tl.tensor,
    out: tl.tensor,  # [T, O], contiguous
    T: tl.tensor,
    tiles_T: tl.tensor,
    HAS_ROWS: tl.constexpr,
    HAS_EXPERTS: tl.constexpr,
    E: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    C: tl.constexpr,
    SPLITS: tl.constexpr,  # 1
    TILE_E: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_O: tl.constexpr,  # 256
) -> None:
    """``block_product`` for many rows: a tile's rows are tokens, and it reads them once for two blocks of outputs.

    A block's scale of the weight is one number. The scales of a step are loaded while the step before is multiplied.
    """
    expert, start, stop, tile_O = _tiles_of(ends, T, tiles_T, HAS_EXPERTS, E, TILE_E, TILE_T, tl.cdiv(O, TILE_O))
    if expert >= E:
        return
    t, i, output = tl.arange(0, TILE_T), tl.arange(0, BLOCK), tile_O * TILE_O + tl.arange(0, BLOCK)
    is_row, first_output = start + t < stop, expert * O + tile_O * TILE_O
    row = (start + tl.where(is_row, t, 0)).to(tl.int64)
    source = tl.load(rows + row) if HAS_ROWS else row
    x_at, x_scale_at = x + source[:, None] * (C * BLOCK) + i[None, :], x_scales + source
    left_at = scales + (expert * R + 2 * tile_O) * C
    right_at = scales + (expert * R + tl.minimum(2 * tile_O + 1, R - 1)) * C
    scale_T, left_scale, right_scale = tl.load(x_scale_at), tl.load(left_at), tl.load(right_at)
    left_TO, right_TO = tl.zeros([TILE_T, BLOCK], tl.float32), tl.zeros([TILE_T, BLOCK], tl.float32)
    for block in range(C):
        left_scale_T, right_scale_T = scale_T * left_scale, scale_T * right_scale
        ahead = tl.minimum(block + 1, C - 1)
        scale_T = tl.load(x_scale_at + ahead * X)
        left_scale, right_scale = tl.load(left_at + ahead), tl.load(right_at + ahead)
        x_TI, weight_OI = tl.load(x_at + block * BLOCK), weight.load([first_output, block * BLOCK])
        left_TO += dot(x_TI, tl.trans(weight_OI), tl.zeros([TILE_T, BLOCK], tl.float32)) * left_scale_T[:, None]
        weight_OI = weight.load([first_output + BLOCK, block * BLOCK])
        right_TO += dot(x_TI, tl.trans(weight_OI), tl.zeros([TILE_T, BLOCK], tl.float32)) * right_scale_T[:, None]
    out_at = out + start.to(tl.int64) * O + t[:, None] * O + output[None, :]
    is_left, is_right = (output < O)[None, :], (output + BLOCK < O)[None, :]
    tl.store(out_at, rounded(left_TO, out.dtype.element_ty), mask=is_row[:, None] & is_left)
    tl.store(out_at + BLOCK, rounded(right_TO, out.dtype.element_ty), mask=is_row[:, None] & is_right)


@triton.jit
def sum_of_splits(
    parts: tl.tensor,  # fp32 [SPLITS, N], contiguous
    out: tl.tensor,  # [N]
    N: tl.tensor,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    n = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    sum_N = tl.zeros([TILE], tl.float32)
    for split in tl.static_range(SPLITS):
        sum_N += tl.load(parts + split * N.to(tl.int64) + n, mask=n < N, other=0.0)
    tl.store(out + n, rounded(sum_N, out.dtype.element_ty), mask=n < N)

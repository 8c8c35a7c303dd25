"""Products of e4m3 blocks, and the blocks: float32 scales for 1 x 128 elements of rows, 128 x 1, or 128 x 128.

Tokens lie expert by expert and are taken in blocks of 128 that begin at an expert's first row: block b of expert e is
number ``start of e // 128 + e + b``, so that no two have one number and the device alone needs to know the counts.
``experts`` int32 [blocks] says whose a block is, ``ends`` int32 [E] where an expert's rows end; not GROUPED, there is
one expert, which has all ``num_rows``. Tensor cores want both operands with neighbours along what is added up, which is
why quantised copies are transposed where their product needs it. Scales are [blocks of what is added up, rows].
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(128)
FP8_MAX = tl.constexpr(448.0)
TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32: a block with a smaller scale counts as zeros


@triton.jit
def _scale_of(peak: tl.tensor) -> tl.tensor:
    scale = tl.div_rn(peak, tl.full(peak.shape, FP8_MAX, tl.float32))
    return tl.where(scale < TINY, 1.0, scale)


@triton.jit
def _rows_of(
    block: tl.tensor, ends: tl.tensor, experts: tl.tensor, num_rows: tl.tensor, GROUPED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """-> the expert of a block of tokens, the block's first row, and the end of the expert's rows."""
    if GROUPED:
        expert = tl.load(experts + block)
        start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        return expert, start + (block - start // BLOCK - expert) * BLOCK, tl.load(ends + expert)
    return 0, block * BLOCK, num_rows


@triton.jit
def quantize_rows(
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    scales_stride: tl.tensor,
    ROWS: tl.constexpr,
) -> None:
    """ROWS rows of one block of columns: values e4m3 [rows, width], scales [blocks of columns, rows]."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    is_in = (rows[:, None] < num_rows) & (columns[None, :] < width)
    part = tl.load(x + rows[:, None] * stride + columns[None, :], mask=is_in, other=0.0).to(tl.float32)
    scale = _scale_of(tl.max(tl.abs(part), 1))
    quantized = tl.div_rn(part, tl.broadcast_to(scale[:, None], part.shape)).to(tl.float8e4nv)
    tl.store(values + rows[:, None] * width + columns[None, :], quantized, mask=is_in)
    tl.store(scales + block * scales_stride + rows, scale, mask=rows < num_rows)


@triton.jit
def quantize_tokens(
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    ends: tl.tensor,
    experts: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    num_blocks: tl.tensor,
    GROUPED: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """COLUMNS columns of one block of tokens: values e4m3 [width, 128 num_blocks], scales [num_blocks, width].

    What a block has beyond its expert's rows is zero.
    """
    block = tl.program_id(0)
    _, first, end = _rows_of(block, ends, experts, num_rows, GROUPED)
    if not GROUPED or first < end:
        tokens = tl.arange(0, BLOCK)
        rows = first.to(tl.int64) + tokens
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        has_column = columns < width
        is_in = (rows[:, None] < end) & has_column[None, :]
        part = tl.load(x + rows[:, None] * stride + columns[None, :], mask=is_in, other=0.0).to(tl.float32)
        scale = _scale_of(tl.max(tl.abs(part), 0))
        quantized = tl.div_rn(part, tl.broadcast_to(scale[None, :], part.shape)).to(tl.float8e4nv)
        places = columns.to(tl.int64)[None, :] * (num_blocks * BLOCK) + (block * BLOCK + tokens)[:, None]
        tl.store(values + places, quantized, mask=has_column[None, :])
        tl.store(scales + block * width + columns, scale, mask=has_column)


@triton.jit
def quantize_weight(
    w: tl.tensor, values: tl.tensor, scales: tl.tensor, num_rows: tl.tensor, width: tl.tensor, TRANSPOSED: tl.constexpr
) -> None:
    """One block of w [E, rows, width]: e4m3 of its shape, scales [E, blocks of rows, blocks of columns].

    TRANSPOSED: values [E, width, rows], scales [E, blocks of columns, blocks of rows].
    """
    row, column, expert = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows = row * BLOCK + tl.arange(0, BLOCK)
    columns = column * BLOCK + tl.arange(0, BLOCK)
    is_in = (rows[:, None] < num_rows) & (columns[None, :] < width)
    start = expert * num_rows * width
    part = tl.load(w + start + rows.to(tl.int64)[:, None] * width + columns[None, :], mask=is_in, other=0.0)
    part = part.to(tl.float32)
    scale = _scale_of(tl.max(tl.max(tl.abs(part), 1), 0))
    quantized = tl.div_rn(part, tl.broadcast_to(scale, part.shape)).to(tl.float8e4nv)
    row_blocks, column_blocks = tl.cdiv(num_rows, BLOCK), tl.cdiv(width, BLOCK)
    scales += expert * row_blocks * column_blocks
    if TRANSPOSED:
        places = columns.to(tl.int64)[None, :] * num_rows + rows[:, None]
        tl.store(scales + column * row_blocks + row, scale)
    else:
        places = rows.to(tl.int64)[:, None] * width + columns[None, :]
        tl.store(scales + row * column_blocks + column, scale)
    tl.store(values + start + places, quantized, mask=is_in)


@triton.jit
def multiply(
    x: tl.tensor,
    x_scales: tl.tensor,
    w: tl.tensor,
    w_scales: tl.tensor,
    out: tl.tensor,
    ends: tl.tensor,
    experts: tl.tensor,
    num_rows: tl.tensor,
    num_blocks: tl.tensor,
    width: tl.tensor,
    inner: tl.tensor,
    GROUPED: tl.constexpr,
    ROWS_TOGETHER: tl.constexpr,
) -> None:
    """A block of tokens by one of columns: out [rows, width] is x [rows, inner] by its expert's w [width, inner].

    What a block of 128 adds up is brought to float32 before the next one. Programs beside one another take
    ROWS_TOGETHER blocks of tokens by neighbouring columns, so that what they read stays in the cache.
    """
    program, columns_of = tl.program_id(0), tl.cdiv(width, BLOCK)
    in_group = ROWS_TOGETHER * columns_of
    first_block = program // in_group * ROWS_TOGETHER
    together = tl.minimum(num_blocks - first_block, ROWS_TOGETHER)
    block = first_block + program % in_group % together
    column = program % in_group // together
    expert, first, end = _rows_of(block, ends, experts, num_rows, GROUPED)
    if first < end:
        rows = first + tl.arange(0, BLOCK)
        columns = column * BLOCK + tl.arange(0, BLOCK)
        steps = tl.arange(0, BLOCK)
        is_row, is_column = rows < end, columns < width
        inner_blocks = tl.cdiv(inner, BLOCK)
        w += expert.to(tl.int64) * width * inner if GROUPED else 0
        w_scales += (expert * columns_of + column) * inner_blocks
        x_places = x + rows.to(tl.int64)[:, None] * inner + steps[None, :]
        w_places = w + columns.to(tl.int64)[None, :] * inner + steps[:, None]
        total = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
        scale, w_scale = tl.load(x_scales + rows, mask=is_row, other=0.0), tl.load(w_scales)
        for part in range(inner_blocks):
            is_in = steps < inner - part * BLOCK
            left = tl.load(x_places + part * BLOCK, mask=is_row[:, None] & is_in[None, :], other=0.0)
            right = tl.load(w_places + part * BLOCK, mask=is_column[None, :] & is_in[:, None], other=0.0)
            scaled_by = scale * w_scale
            ahead = tl.minimum(part + 1, inner_blocks - 1)  # loaded while the tensor cores work
            scale = tl.load(x_scales + ahead * num_rows + rows, mask=is_row, other=0.0)
            w_scale = tl.load(w_scales + ahead)
            total += tl.dot(left, right) * scaled_by[:, None]
        places = out + rows.to(tl.int64)[:, None] * width + columns[None, :]
        tl.store(places, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def multiply_tokens(
    a: tl.tensor,
    a_scales: tl.tensor,
    b: tl.tensor,
    b_scales: tl.tensor,
    out: tl.tensor,
    ends: tl.tensor,
    num_rows: tl.tensor,
    num_blocks: tl.tensor,
    a_width: tl.tensor,
    b_width: tl.tensor,
    GROUPED: tl.constexpr,
    ADDS: tl.constexpr,
) -> None:
    """128 x 128 of one expert's out [a_width, b_width]: a [a_width, 128 num_blocks] by b, added up over its tokens.

    ADDS: to what out has. An expert without rows gives zeros.
    """
    row, column, expert = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, blocks = 0, num_blocks
    if GROUPED:
        start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        first = start // BLOCK + expert
        blocks = tl.cdiv(tl.load(ends + expert) - start, BLOCK)
    rows = row * BLOCK + tl.arange(0, BLOCK)
    columns = column * BLOCK + tl.arange(0, BLOCK)
    tokens = tl.arange(0, BLOCK)
    is_row, is_column = rows < a_width, columns < b_width
    stride = num_blocks * BLOCK
    a_places = a + rows.to(tl.int64)[:, None] * stride + tokens[None, :]
    b_places = b + columns.to(tl.int64)[None, :] * stride + tokens[:, None]
    total = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    a_scale = tl.load(a_scales + first * a_width + rows, mask=is_row & (blocks > 0), other=0.0)
    b_scale = tl.load(b_scales + first * b_width + columns, mask=is_column & (blocks > 0), other=0.0)
    for block in range(first, first + blocks):
        left = tl.load(a_places + block * BLOCK, mask=is_row[:, None], other=0.0)
        right = tl.load(b_places + block * BLOCK, mask=is_column[None, :], other=0.0)
        left_scale, right_scale = a_scale, b_scale
        ahead = tl.minimum(block + 1, first + blocks - 1)
        a_scale = tl.load(a_scales + ahead * a_width + rows, mask=is_row, other=0.0)
        b_scale = tl.load(b_scales + ahead * b_width + columns, mask=is_column, other=0.0)
        total += tl.dot(left, right) * left_scale[:, None] * right_scale[None, :]
    places = out + (expert.to(tl.int64) * a_width + rows[:, None]) * b_width + columns[None, :]
    is_in = is_row[:, None] & is_column[None, :]
    if ADDS:
        total += tl.load(places, mask=is_in, other=0.0).to(tl.float32)
    tl.store(places, total.to(out.dtype.element_ty), mask=is_in)

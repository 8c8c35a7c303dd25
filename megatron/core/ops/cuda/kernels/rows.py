"""RMSNorm, SwiGLU and rotary positions, forward and backward; a program takes a row, or a part of one."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    inverse: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One row: out and the inverse of its root mean square (float32). Rounds before the weight, as the reference."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_in = columns < width
    values = tl.load(x + row * stride + columns, mask=is_in, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    normed = (values * scale).to(out.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + columns, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, (normed * factor).to(out.dtype.element_ty), mask=is_in)
    tl.store(inverse + row, scale)


@triton.jit
def rms_norm_grad(
    grad: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    inverse: tl.tensor,
    grad_x: tl.tensor,
    parts: tl.tensor,
    stride: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """ROWS rows; parts [programs, width] float32: what a program's rows add to weight's gradient."""
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    factor = tl.load(weight + columns, mask=columns < width, other=0.0).to(tl.float32)
    grad_weight = tl.zeros([BLOCK], dtype=tl.float32)
    for index in range(ROWS):
        row = program * ROWS + index
        is_in = (columns < width) & (row < num_rows)
        scale = tl.load(inverse + row, mask=row < num_rows, other=0.0)
        normed = tl.load(x + row * stride + columns, mask=is_in, other=0.0).to(tl.float32) * scale
        grad_out = tl.load(grad + row * width + columns, mask=is_in, other=0.0).to(tl.float32)
        grad_weight += grad_out * normed.to(grad_x.dtype.element_ty).to(tl.float32)
        grad_normed = grad_out * factor
        shared = tl.sum(grad_normed * normed, 0) / width
        result = (grad_normed - normed * shared) * scale
        tl.store(grad_x + row * width + columns, result.to(grad_x.dtype.element_ty), mask=is_in)
    tl.store(parts + program * width + columns, grad_weight, mask=columns < width)


@triton.jit
def swiglu(x: tl.tensor, out: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr) -> None:
    """x [rows, 2 width] = (gate | up) -> out [rows, width]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < width
    gate = tl.load(x + row * 2 * width + columns, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + columns, mask=is_in, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out + row * width + columns, result.to(out.dtype.element_ty), mask=is_in)


@triton.jit
def swiglu_grad(grad: tl.tensor, x: tl.tensor, grad_x: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr) -> None:
    """With ``s = sigmoid(gate)``: gate's gradient is ``grad up s (1 + gate (1 - s))``, up's is ``grad gate s``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < width
    gate_at = row * 2 * width + columns
    gate = tl.load(x + gate_at, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(x + gate_at + width, mask=is_in, other=0.0).to(tl.float32)
    grad_out = tl.load(grad + row * width + columns, mask=is_in, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    grad_gate = grad_out * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(grad_x + gate_at, grad_gate.to(grad_x.dtype.element_ty), mask=is_in)
    tl.store(grad_x + gate_at + width, (grad_out * gate * sigmoid).to(grad_x.dtype.element_ty), mask=is_in)


@triton.jit
def rotary(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    num_heads: tl.tensor,
    size: tl.tensor,
    sign: tl.tensor,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Turns neighbouring pairs of x [T, N, size] by ``sign`` times the angle; out is contiguous."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, 2 * PAIRS)
    is_in = (heads < num_heads)[:, None] & (columns < size)[None, :]
    source = x + token * token_stride + heads[:, None] * head_stride + columns[None, :]
    values = tl.load(source, mask=is_in, other=0.0).to(tl.float32)
    first, second = tl.split(tl.reshape(values, HEADS, PAIRS, 2))
    pairs = tl.arange(0, PAIRS)
    angle_at = token * (size // 2) + pairs
    cosine = tl.load(cos + angle_at, mask=pairs < size // 2, other=0.0)[None, :]
    sine = tl.load(sin + angle_at, mask=pairs < size // 2, other=0.0)[None, :] * sign
    turned = tl.join(first * cosine - second * sine, first * sine + second * cosine)
    target = out + (token * num_heads + heads[:, None]) * size + columns[None, :]
    tl.store(target, tl.reshape(turned, HEADS, 2 * PAIRS).to(out.dtype.element_ty), mask=is_in)

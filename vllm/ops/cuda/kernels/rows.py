"""Norms, gates, rotary positions and cache writes: every tensor is read and written once, sums are float32.

Results are rounded to the tensors' dtype where the reference rounds them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm.ops.cuda.kernels.arithmetic import rounded


@triton.jit
def rms_norm(
    x: tl.tensor,  # [T, H]; with a residual it becomes the sum
    x_stride: tl.tensor,
    residual: tl.tensor,  # [T, H], contiguous
    weight: tl.tensor,  # [H]
    out: tl.tensor,  # [T, H], contiguous
    eps: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    H: tl.constexpr,
    TILE_H: tl.constexpr,
) -> None:
    row, h = tl.program_id(0).to(tl.int64), tl.arange(0, TILE_H)
    is_channel = h < H
    x_at = x + row * x_stride + h
    x_H = tl.load(x_at, mask=is_channel, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual_H = tl.load(residual + row * H + h, mask=is_channel, other=0.0).to(tl.float32)
        sum_H = rounded(x_H + residual_H, x.dtype.element_ty)
        tl.store(x_at, sum_H, mask=is_channel)
        x_H = sum_H.to(tl.float32)
    weight_H = tl.load(weight + h, mask=is_channel, other=0.0).to(tl.float32)
    tl.store(out + row * H + h, normed(x_H, tl.sum(x_H * x_H, 0), weight_H, eps, H, out), mask=is_channel)


@triton.jit
def normed(
    x: tl.tensor, square_sum: tl.tensor, weight: tl.tensor, eps: tl.tensor, SIZE: tl.constexpr, like: tl.tensor
) -> tl.tensor:
    """x / sqrt(square_sum / SIZE + eps) * weight in the dtype of what `like` points to, rounded before the weight."""
    scaled = rounded(x / tl.sqrt(square_sum / SIZE + eps), like.dtype.element_ty).to(tl.float32)
    return rounded(scaled * weight, like.dtype.element_ty)


@triton.jit
def silu_and_mul(
    x: tl.tensor,  # [T, 2F]
    x_stride: tl.tensor,
    out: tl.tensor,  # [T, F], contiguous
    F: tl.constexpr,
    TILE_F: tl.constexpr,
) -> None:
    row, f = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE_F + tl.arange(0, TILE_F)
    gate_at = x + row * x_stride + f
    gate_F = tl.load(gate_at, mask=f < F, other=0.0).to(tl.float32)
    up_F = tl.load(gate_at + F, mask=f < F, other=0.0).to(tl.float32)
    silu_F = rounded(gate_F / (1.0 + tl.exp(-gate_F)), out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * F + f, rounded(silu_F * up_F, out.dtype.element_ty), mask=f < F)


@triton.jit
def rotary_interleaved(
    x: tl.tensor,  # [T, N, R]
    x_stride_T: tl.tensor,
    x_stride_N: tl.tensor,
    cos: tl.tensor,  # fp32 [T, R], contiguous
    sin: tl.tensor,
    out: tl.tensor,  # [T, N, R], contiguous
    N: tl.constexpr,
    R: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_R: tl.constexpr,  # of pairs
) -> None:
    row, n, r = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE_N + tl.arange(0, TILE_N), tl.arange(0, TILE_R)
    is_pair, is_in = r < R // 2, (n[:, None] < N) & (r[None, :] < R // 2)
    cos_R = tl.load(cos + row * R + r, mask=is_pair, other=0.0)[None, :]
    sin_R = tl.load(sin + row * R + r, mask=is_pair, other=0.0)[None, :]
    even_at = x + row * x_stride_T + n[:, None] * x_stride_N + 2 * r[None, :]
    even_NR = tl.load(even_at, mask=is_in, other=0.0).to(tl.float32)
    odd_NR = tl.load(even_at + 1, mask=is_in, other=0.0).to(tl.float32)
    out_at = out + (row * N + n[:, None]) * R + r[None, :]
    tl.store(out_at, rounded(even_NR * cos_R - odd_NR * sin_R, out.dtype.element_ty), mask=is_in)
    tl.store(out_at + R // 2, rounded(odd_NR * cos_R + even_NR * sin_R, out.dtype.element_ty), mask=is_in)


@triton.jit
def norm_rope_write_kv(
    pages: tl.tensor,  # [slots, L + R], contiguous
    kv: tl.tensor,  # [T, L + R]
    kv_stride: tl.tensor,
    weight: tl.tensor,  # [L]
    cos: tl.tensor,  # fp32 [T, R], contiguous
    sin: tl.tensor,
    slots: tl.tensor,  # int64 [T]
    eps: tl.tensor,
    L: tl.constexpr,
    R: tl.constexpr,
    TILE_L: tl.constexpr,
    TILE_R: tl.constexpr,  # of pairs
) -> None:
    row, c, r = tl.program_id(0).to(tl.int64), tl.arange(0, TILE_L), tl.arange(0, TILE_R)
    slot_at, is_pair = pages + tl.load(slots + row) * (L + R), r < R // 2
    latent_L = tl.load(kv + row * kv_stride + c, mask=c < L, other=0.0).to(tl.float32)
    weight_L = tl.load(weight + c, mask=c < L, other=0.0).to(tl.float32)
    tl.store(slot_at + c, normed(latent_L, tl.sum(latent_L * latent_L, 0), weight_L, eps, L, pages), mask=c < L)
    cos_R = tl.load(cos + row * R + r, mask=is_pair, other=0.0)
    sin_R = tl.load(sin + row * R + r, mask=is_pair, other=0.0)
    even_at = kv + row * kv_stride + L + 2 * r
    even_R = tl.load(even_at, mask=is_pair, other=0.0).to(tl.float32)
    odd_R = tl.load(even_at + 1, mask=is_pair, other=0.0).to(tl.float32)
    tl.store(slot_at + L + r, rounded(even_R * cos_R - odd_R * sin_R, pages.dtype.element_ty), mask=is_pair)
    tl.store(slot_at + L + R // 2 + r, rounded(odd_R * cos_R + even_R * sin_R, pages.dtype.element_ty), mask=is_pair)


@triton.jit
def rope_write_gqa(
    pages: tl.tensor,  # [slots, 2, G, D], contiguous
    qkv: tl.tensor,  # [T, N + 2G, D]
    qkv_stride_T: tl.tensor,
    qkv_stride_M: tl.tensor,
    bias: tl.tensor,  # [N + 2G, D], contiguous
    q_weight: tl.tensor,  # [D]
    k_weight: tl.tensor,  # [D]
    cos: tl.tensor,  # fp32 [T, R], contiguous
    sin: tl.tensor,
    slots: tl.tensor,  # int64 [T]
    q_out: tl.tensor,  # [T, N, D], contiguous
    eps: tl.tensor,
    HAS_BIAS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_D: tl.constexpr,
) -> None:
    row, m, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE_M + tl.arange(0, TILE_M), tl.arange(0, TILE_D)
    is_q, is_v, is_in = m[:, None] < N, m[:, None] >= N + G, (m[:, None] < N + 2 * G) & (d[None, :] < D)
    # A channel i is turned with its partner, i + R / 2 or i - R / 2, which is loaded once more.
    partner = tl.where(d < R // 2, d + R // 2, tl.where(d < R, d - R // 2, d))
    x_MD = _head_channels(qkv, row, qkv_stride_T, qkv_stride_M, bias, m, d, is_in, HAS_BIAS, D)
    partner_MD = _head_channels(qkv, row, qkv_stride_T, qkv_stride_M, bias, m, partner, is_in, HAS_BIAS, D)
    if HAS_NORMS:
        square_sum_M = tl.sum(x_MD * x_MD, 1)[:, None]
        x_MD = _normed_heads(x_MD, square_sum_M, q_weight, k_weight, d, is_q, is_v, eps, D, pages)
        partner_MD = _normed_heads(partner_MD, square_sum_M, q_weight, k_weight, partner, is_q, is_v, eps, D, pages)
    cos_D = tl.load(cos + row * R + d, mask=d < R, other=1.0)[None, :]
    sin_D = tl.load(sin + row * R + d, mask=d < R, other=0.0)[None, :]
    turned_MD = x_MD * cos_D + partner_MD * tl.where(d < R // 2, -sin_D, sin_D)
    out_MD = rounded(tl.where(is_v, x_MD, turned_MD), pages.dtype.element_ty)
    tl.store(q_out + (row * N + m[:, None]) * D + d[None, :], out_MD, mask=is_in & is_q)
    slot_at = pages + tl.load(slots + row) * (2 * G * D)
    tl.store(slot_at + (m[:, None] - N) * D + d[None, :], out_MD, mask=is_in & (m[:, None] >= N))


@triton.jit
def _head_channels(
    qkv: tl.tensor,
    row: tl.tensor,
    stride_T: tl.tensor,
    stride_M: tl.tensor,
    bias: tl.tensor,
    m: tl.tensor,
    d: tl.tensor,
    is_in: tl.tensor,
    HAS_BIAS: tl.constexpr,
    D: tl.constexpr,
) -> tl.tensor:
    """Channels `d` of heads `m`, with their biases, as float32."""
    x_MD = tl.load(qkv + row * stride_T + m[:, None] * stride_M + d[None, :], mask=is_in, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias_MD = tl.load(bias + m[:, None] * D + d[None, :], mask=is_in, other=0.0).to(tl.float32)
        x_MD = rounded(x_MD + bias_MD, qkv.dtype.element_ty).to(tl.float32)
    return x_MD


@triton.jit
def _normed_heads(
    x_MD: tl.tensor,
    square_sum_M: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    d: tl.tensor,
    is_q: tl.tensor,
    is_v: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    like: tl.tensor,
) -> tl.tensor:
    """Queries and keys normed, values as they are, as float32."""
    q_weight_D = tl.load(q_weight + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    k_weight_D = tl.load(k_weight + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    normed_MD = normed(x_MD, square_sum_M, tl.where(is_q, q_weight_D, k_weight_D), eps, D, like).to(tl.float32)
    return tl.where(is_v, x_MD, normed_MD)

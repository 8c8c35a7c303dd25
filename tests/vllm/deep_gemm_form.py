"""What DeepGEMM's README and tests say of two of its products, in plain torch: stands in for `deep_gemm` on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

Scaled = tuple[Tensor, Tensor]
calls: list[str] = []


def fp8_gemm_nt(a: Scaled, b: Scaled, d: Tensor) -> None:
    """d [M, N] = a [M, K] b [N, K]^T; a has fp32 scales [M, K / 128], b [ceil(N / 128), K / 128]."""
    calls.append("fp8_gemm_nt")
    _check(a, (1, 128))
    _check(b, (128, 128))
    d.copy_(_dequantized(a, 1) @ _dequantized(b, 128).T)


def m_grouped_fp8_gemm_nt_contiguous(a: Scaled, b: Scaled, d: Tensor, m_indices: Tensor) -> None:
    """Row m takes b[m_indices[m]]; a group's rows begin at a multiple of 128, rows of -1 are not computed."""
    calls.append("m_grouped_fp8_gemm_nt_contiguous")
    _check(a, (1, 128))
    _check((b[0][0], b[1][0]), (128, 128))
    assert m_indices.dtype == torch.int32 and m_indices.shape == (len(d),) and len(d) % 128 == 0
    d.fill_(float("nan"))
    for tile, groups in enumerate(m_indices.split(128)):
        found = set(groups.tolist()) - {-1}
        assert len(found) <= 1, "one group to a tile"
        for group in found:
            rows = slice(tile * 128, tile * 128 + 128)
            products = _dequantized((a[0][rows], a[1][rows]), 1) @ _dequantized((b[0][group], b[1][group]), 128).T
            d[rows] = torch.where((groups == group)[:, None], products.to(d.dtype), d[rows])


def _check(x: Scaled, block: tuple[int, int]) -> None:
    values, scales = x
    assert values.dtype == torch.float8_e4m3fn and values.is_contiguous() and scales.dtype == torch.float32
    assert scales.shape == tuple(-(-size // step) for size, step in zip(values.shape, block, strict=True))


def _dequantized(x: Scaled, rows: int) -> Tensor:
    values, scales = x
    return values.float() * scales.repeat_interleave(rows, 0)[: len(values)].repeat_interleave(128, 1)

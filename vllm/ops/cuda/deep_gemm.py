"""FP8 products by DeepGEMM (https://github.com/deepseek-ai/DeepGEMM), version 2 or later, on Hopper.

Limits: bfloat16 activations, and weights whose scales are those of 128 rows each from their first row on; others take
the kernels of ``fp8.py``. Rows of experts are copied to where each expert's begin at a multiple of 128, and back. On
Blackwell the library rounds scales to powers of two, which is another arithmetic: the table refuses that device.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from hf_formats.fp8 import FP8_DTYPE
from vllm.ops.cuda.fp8 import Fp8Products, Fp8Rows
from vllm.ops.weights import Fp8Operand

_ROWS = 128  # an expert's rows begin at a multiple of it


class DeepGemmProducts(Fp8Products):
    """``Fp8Products`` with the library's products."""

    implementation = "DeepGEMM"

    def _product(
        self, x: Fp8Rows, weight: Fp8Operand, num_rows: int, ends_E: Tensor | None, source_S: Tensor | None
    ) -> Tensor:
        if weight.dtype is not torch.bfloat16 or not weight.scales.has_whole_row_blocks or num_rows == 0:
            return super()._product(x, weight, num_rows, ends_E, source_S)
        import deep_gemm

        matrix = weight.values, weight.scales.scale_inv
        if ends_E is None:
            out = x.scale_CT.new_empty(num_rows, weight.shape[-2], dtype=weight.dtype)
            deep_gemm.fp8_gemm_nt((x.values_TI, x.scale_CT.T), matrix, out)
            return out
        row_M, expert_M, place_S = in_whole_tiles(ends_E, num_rows)
        source_M = row_M if source_S is None else source_S.index_select(0, row_M)
        values_MI = x.values_TI.view(torch.int64).index_select(0, source_M).view(FP8_DTYPE)  # a copy of bytes
        scale_CM = x.scale_CT.index_select(1, source_M)
        out_MO = scale_CM.new_empty(len(row_M), weight.shape[-2], dtype=weight.dtype)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous((values_MI, scale_CM.T), matrix, out_MO, expert_M)
        return out_MO.index_select(0, place_S)


def in_whole_tiles(ends_E: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each of M rows, where every expert's begin at a multiple of 128, the row that it takes and its expert
    (int32, -1 for none), and for each of ``num_rows`` rows its place among them. M is the most that they can need.
    """
    count_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    size_E = (count_E + _ROWS - 1) // _ROWS * _ROWS
    stop_E = size_E.cumsum(0)
    start_E, shift_E = stop_E - size_E, stop_E - size_E - (ends_E - count_E)
    m = torch.arange((num_rows + len(ends_E) * (_ROWS - 1)) // _ROWS * _ROWS, device=ends_E.device)
    expert_M = torch.searchsorted(stop_E, m, right=True).clamp_(max=len(ends_E) - 1)
    is_row_M = m - start_E[expert_M] < count_E[expert_M]
    row_M = torch.where(is_row_M, m - shift_E[expert_M], 0)
    s = torch.arange(num_rows, device=ends_E.device)
    expert_S = torch.searchsorted(ends_E.to(s.dtype), s, right=True).clamp_(max=len(ends_E) - 1)
    place_S = (s + shift_E[expert_S]).clamp_(max=len(m) - 1)
    return row_M, torch.where(is_row_M, expert_M, -1).int(), place_S


def check_deep_gemm() -> None:
    """Raise a ValueError where the library is not installed, or the device is not one for it."""
    provider = "rollout_ops='vllm.ops.cuda:deep_gemm_ops'"
    instead = "or set rollout_ops='vllm.ops.cuda:rollout_ops', whose FP8 products are Triton kernels"
    if importlib.util.find_spec("deep_gemm") is None:
        raise ValueError(f"{provider} needs DeepGEMM 2 (deep_gemm), which is not installed: install it, {instead}")
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
        name = torch.cuda.get_device_name()
        raise ValueError(f"{provider} is for Hopper (compute capability 9), this is {name}: use one, {instead}")

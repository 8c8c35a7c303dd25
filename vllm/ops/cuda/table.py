"""The op table of NVIDIA devices: Triton kernels and torch's own products, everything of a decode step capturable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from vllm.ops import reference
from vllm.ops.contract import RolloutOps, entries_of, takes_no_fp8
from vllm.ops.cuda.attention import Attention
from vllm.ops.cuda.deep_gemm import DeepGemmProducts, check_deep_gemm
from vllm.ops.cuda.exchange import exchanged_experts
from vllm.ops.cuda.experts import ExpertOps
from vllm.ops.cuda.fp8 import Fp8Products, fits, has_fp8_products, scaled_mm
from vllm.ops.cuda.launch import Launch, check_triton, launch
from vllm.ops.cuda.rows import RowOps
from vllm.ops.weights import Fp8Operand, new_row_major_weight


def _partly_torch(fp8: str) -> dict[str, str]:
    """The implementations of what is torch's own, or partly, with those of FP8 weights."""
    return {
        "new_kv_cache": "reference",
        "new_gqa_cache": "reference",
        "linear": f"native (torch; {fp8})",
        "head_linear": "native (torch)",
        "fused_experts": f"native (torch's grouped_mm and kernels; {fp8})",
        "exchanged_experts": f"native experts ({fp8}), torch's collectives",
        "sample": "native without filters, reference with them",
    }


def rollout_ops() -> RolloutOps:
    """The table for NVIDIA devices (provider ``vllm.ops.cuda:rollout_ops``).

    Raises:
        ValueError: triton is not installed, or torch is too old.
    """
    return _table_of(partial(Fp8Products, scaled_mm=scaled_mm()), has_fp8_products())


def deep_gemm_ops() -> RolloutOps:
    """The same table with DeepGEMM's FP8 products (provider ``vllm.ops.cuda:deep_gemm_ops``).

    Raises:
        ValueError: DeepGEMM or triton is not installed, torch is too old, or the device is not Hopper.
    """
    check_deep_gemm()
    return _table_of(DeepGemmProducts, True)


def _table_of(fp8_products: Callable[[Launch], Fp8Products], multiplies_fp8: bool) -> RolloutOps:
    check_triton()
    if not hasattr(F, "grouped_mm"):
        raise ValueError(
            "rollout_ops='vllm.ops.cuda:rollout_ops' needs torch.nn.functional.grouped_mm; install torch 2.10 or "
            "later, or set rollout_ops='vllm.ops.reference:rollout_ops'"
        )
    return cuda_table(multiplies_fp8=multiplies_fp8, fp8_products=fp8_products)


def cuda_table(
    launch: Launch = launch, multiplies_fp8: bool = True, fp8_products: Callable[[Launch], Fp8Products] = Fp8Products
) -> RolloutOps:
    """Return the table.

    Args:
        launch: runs a kernel, given its name, its grid, its arguments and constants; a plan's does not run it.
        multiplies_fp8: whether FP8 weights are multiplied in FP8, which not every device can.
        fp8_products: what multiplies them then.
    """
    attention, rows, fp8 = Attention(launch), RowOps(launch), fp8_products(launch)
    experts = ExpertOps(launch, rows, fp8)

    def linear(x_TI: Tensor, weight_OI: Any) -> Tensor:
        return fp8.linear(x_TI, weight_OI) if isinstance(weight_OI, Fp8Operand) else reference.linear(x_TI, weight_OI)

    native = entries_of(attention, rows, experts)
    return replace(
        reference.rollout_ops(),
        **native,
        linear=linear,
        exchanged_experts=partial(exchanged_experts, experts=experts.fused_experts),
        implementations=dict.fromkeys(native, "native")
        | _partly_torch(f"FP8 weights: {fp8.implementation if multiplies_fp8 else 'dequantised'}"),
        not_capturable=(),
        new_weight=new_row_major_weight,
        takes_fp8=fits if multiplies_fp8 else takes_no_fp8,
    )

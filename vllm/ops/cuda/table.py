"""The op table of NVIDIA devices: Triton kernels and torch's own products, everything of a decode step capturable."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.nn.functional as F

from vllm.ops import reference
from vllm.ops.contract import RolloutOps
from vllm.ops.cuda.attention import Attention
from vllm.ops.cuda.experts import ExpertOps
from vllm.ops.cuda.launch import Launch, check_triton, launch
from vllm.ops.cuda.rows import RowOps

# What is torch's own, or partly.
_TORCH = {
    "new_kv_cache": "reference",
    "new_gqa_cache": "reference",
    "linear": "native (torch)",
    "head_linear": "native (torch)",
    "fused_experts": "native (torch's grouped_mm and kernels)",
    "exchanged_experts": "native experts, torch's collectives",
    "sample": "native without filters, reference with them",
}


def rollout_ops() -> RolloutOps:
    """The table for NVIDIA devices (provider ``vllm.ops.cuda:rollout_ops``).

    Raises:
        ValueError: triton is not installed, or torch is too old.
    """
    check_triton()
    if not hasattr(F, "grouped_mm"):
        raise ValueError(
            "rollout_ops='vllm.ops.cuda:rollout_ops' needs torch.nn.functional.grouped_mm; install torch 2.10 or "
            "later, or set rollout_ops='vllm.ops.reference:rollout_ops'"
        )
    return cuda_table()


def cuda_table(launch: Launch = launch) -> RolloutOps:
    """Return the table.

    launch: runs a kernel, given its name, its grid, its arguments and constants; a plan's does not run it.
    """
    attention, rows = Attention(launch), RowOps(launch)
    experts = ExpertOps(launch, rows)
    native: dict[str, Any] = {
        "rms_norm": rows.rms_norm,
        "add_rms_norm": rows.add_rms_norm,
        "rotary_interleaved": rows.rotary_interleaved,
        "norm_rope_write_kv": rows.norm_rope_write_kv,
        "mla_decode": attention.mla_decode,
        "mla_prefill": attention.mla_prefill,
        "rope_write_gqa": rows.rope_write_gqa,
        "gqa_decode": attention.gqa_decode,
        "gqa_prefill": attention.gqa_prefill,
        "topk_router": experts.topk_router,
        "silu_and_mul": rows.silu_and_mul,
    }
    return replace(
        reference.rollout_ops(),
        **native,
        fused_experts=experts.fused_experts,
        exchanged_experts=experts.exchanged_experts,
        sample=rows.sample,
        implementations=dict.fromkeys(native, "native") | _TORCH,
        not_capturable=(),
    )

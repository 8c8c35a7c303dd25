"""The op table of an NVIDIA GPU."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import torch
import torch.nn.functional as F

from megatron.core.ops import fused_adamw, reference
from megatron.core.ops.contract import TrainOps
from megatron.core.ops.cuda.attention import FlashAttention

# Ops without a CPU form, which tests put a plain-torch form in place of, and what shows them right on a GPU.
ONLY_ON_GPU = {
    "aten::_flash_attention_forward": "core_attention and attention_block equal the reference",
    "aten::_flash_attention_backward": "core_attention's gradients and attention_block_grad equal the reference",
    "symm_mem::fused_all_gather_matmul": "on two GPUs, a run with tp_comm_overlap has the losses of one without",
    "symm_mem::fused_matmul_reduce_scatter": "the same run",
}

_FLASH = "native (aten flash attention) in half precision, else reference"
_NAMES = {
    "rms_norm": "native (triton)",
    "swiglu": "native (triton)",
    "rotary_interleaved": "native (triton)",
    "core_attention": _FLASH,
    "attention_block": _FLASH,
    "attention_block_grad": _FLASH,
    "matmul": "native (torch.mm)",
    "grouped_matmul": "native (torch grouped_mm) in bfloat16, else reference",
    "token_permute": "native (torch sort, triton gradient)",
    "token_unpermute": "native (triton)",
    "topk_router": "native choice (triton) of float32 logits, weights in torch",
    "log_sum_exp": "native (triton)",
    "cross_entropy_grad": "native (triton)",
    "adamw_step": "native (torch._fused_adamw_)",
}


def cuda_ops(tp_comm_overlap: bool = False) -> TrainOps:
    """The table (provider ``megatron.core.ops.cuda:cuda_ops``); nothing touches a device before an op is called.

    tp_comm_overlap (Megatron's name): products of sequence parallelism run beside their collectives.
    Products are added up in float32, as the contract says: torch's setting that lets bfloat16 do less is put off.

    Raises:
        ValueError: triton is not installed, or this torch has no grouped_mm.
    """
    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            "the CUDA train ops need triton: install the one that this torch names (pip install torch draws it in), "
            "or train with 'megatron.core.ops.reference:reference_ops'"
        )
    if not hasattr(F, "grouped_mm"):
        raise ValueError(
            f"the CUDA train ops need torch.nn.functional.grouped_mm, and torch {torch.__version__} has none: install "
            "torch 2.10 or newer, or train with 'megatron.core.ops.reference:reference_ops'"
        )
    from megatron.core.ops.cuda import experts, rows, vocab  # what imports triton

    attention = FlashAttention()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    table = TrainOps(
        rms_norm=rows.rms_norm,
        swiglu=rows.swiglu,
        rotary_interleaved=rows.rotary_interleaved,
        core_attention=attention,
        attention_block=attention.block,
        attention_block_grad=attention.block_grad,
        matmul=reference.matmul,
        grouped_matmul=experts.grouped_matmul,
        token_permute=experts.token_permute,
        token_unpermute=experts.token_unpermute,
        topk_router=experts.topk_router,
        log_sum_exp=vocab.log_sum_exp,
        cross_entropy_grad=vocab.cross_entropy_grad,
        adamw_step=fused_adamw.adamw_step,
        names=dict(_NAMES),
    )
    if not tp_comm_overlap:
        return table
    from megatron.core.ops.cuda.symmetric_memory import SymmetricMemoryOverlap  # registers torch's ops

    names = _NAMES | {"tensor_parallel_overlap": "native (torch symmetric memory)"}
    return replace(table, tensor_parallel_overlap=SymmetricMemoryOverlap(), names=names)

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
    "shared_prompt_attention": _FLASH,
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


_FP8_NAME = "native (triton, on Hopper cuBLAS; FP8: e4m3 blocks of activations, gradients and weights)"
_FP8_CAPABILITY = (9, 0)


def cuda_ops(tp_comm_overlap: bool = False, fp8: str | None = None, fp8_recipe: str | None = None) -> TrainOps:
    """The table (provider ``megatron.core.ops.cuda:cuda_ops``); nothing touches a device before an op is called.

    Products are added up in float32, as the contract says: torch's setting that lets bfloat16 do less is put off.

    Args:
        tp_comm_overlap: Megatron's name; products of sequence parallelism run beside their collectives.
        fp8, fp8_recipe: Megatron's names; with "e4m3" and "blockwise" linear layers and experts multiply e4m3 blocks,
            forward and for both gradients (``reference_fp8``).

    Raises:
        ValueError: triton is not installed, this torch has no grouped_mm, or the GPU no FP8; or overlap with FP8.
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
        shared_prompt_attention=attention.shared_prompts,
        names=dict(_NAMES),
    )
    if tp_comm_overlap and fp8 is not None:
        raise ValueError(
            f"tp_comm_overlap=True with fp8={fp8!r}: torch's ops that multiply while tokens travel take no FP8 blocks; "
            "leave one of the two out"
        )
    if tp_comm_overlap:
        return _with_overlap(table)
    return table if fp8 is None and fp8_recipe is None else _with_fp8(table, fp8, fp8_recipe)


def _with_overlap(table: TrainOps) -> TrainOps:
    from megatron.core.ops.cuda.symmetric_memory import SymmetricMemoryOverlap  # registers torch's ops

    names = table.names | {"tensor_parallel_overlap": "native (torch symmetric memory)"}
    return replace(table, tensor_parallel_overlap=SymmetricMemoryOverlap(), names=names)


def _with_fp8(table: TrainOps, fp8: str | None, recipe: str | None) -> TrainOps:
    if (fp8, recipe) != ("e4m3", "blockwise"):
        raise ValueError(
            f"fp8 is {fp8!r} and fp8_recipe {recipe!r}: the CUDA train ops have fp8='e4m3' with fp8_recipe='blockwise'"
        )
    if torch.cuda.is_available() and (capability := torch.cuda.get_device_capability()) < _FP8_CAPABILITY:
        raise ValueError(
            f"fp8={fp8!r} needs a GPU of compute capability 9.0 (H100) or later, and {torch.cuda.get_device_name()} "
            f"has {'.'.join(map(str, capability))}: leave fp8 out"
        )
    from megatron.core.ops.cuda import fp8 as products

    return replace(
        table,
        grouped_matmul=products.grouped_matmul,
        linear_products=products.Fp8Products(products.products_of_cublas()),
        names=table.names | dict.fromkeys(("grouped_matmul", "linear_products"), _FP8_NAME),
    )

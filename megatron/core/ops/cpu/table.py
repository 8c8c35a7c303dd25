"""The op table of a CPU: the reference, except for the ops that a CPU computes faster in another way."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.core.ops import fused_adamw
from megatron.core.ops.contract import TrainOps
from megatron.core.ops.cpu import rows, vocab
from megatron.core.ops.cpu.adamw import adamw_step
from megatron.core.ops.cpu.attention import core_attention, shared_prompt_attention
from megatron.core.ops.cpu.build import kernels_problem
from megatron.core.ops.cpu.instructions import is_widened
from megatron.core.ops.reference import reference_ops
from megatron.core.ops.reference_moe import GroupedMatmulFunction

logger = logging.getLogger(__name__)

# float32 copies and their products are made in parts of about this many elements (64 MiB), at least so many rows or
# columns of them: the logits of a large vocabulary would otherwise take more memory than all the layers.
_WIDE_ELEMENTS, _MIN_WIDE = 1 << 24, 256


def cpu_ops() -> TrainOps:
    """Matmuls in float32 where bfloat16 has no instruction; AdamW in one pass.

    With a C++ compiler there are kernels for attention, norms, SwiGLU, rotary positions, the order of tokens by expert,
    sums over logits and AdamW. Without one that builds them these are the reference, AdamW torch's: the table and a
    warning say so.
    """
    native: dict[str, Any] = {"matmul": matmul, "grouped_matmul": grouped_matmul, "adamw_step": fused_adamw.adamw_step}
    problem = kernels_problem()
    if problem is not None:
        logger.warning("training runs on the reference ops, several times slower than on the kernels: %s", problem)
    else:
        names = ("rms_norm", "swiglu", "rotary_interleaved", "token_permute", "token_unpermute")
        native |= {"core_attention": core_attention, "shared_prompt_attention": shared_prompt_attention}
        native["adamw_step"] = adamw_step
        native |= {name: getattr(rows, name) for name in names}
        native |= {"log_sum_exp": vocab.log_sum_exp, "cross_entropy_grad": vocab.cross_entropy_grad}
    table = reference_ops()
    return replace(table, **native, names=table.names | dict.fromkeys(native, "native"))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """See ``contract.Matmul``."""
    out = a.new_empty(a.shape[0], b.shape[1])
    _mm_into(a, b, out)
    return out


def grouped_matmul(x: Tensor, w: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """See ``contract.GroupedMatmul``; only one expert's weight is widened at a time, weight gradients are added up."""
    out: Tensor = GroupedMatmulFunction.apply(x, w, tokens_per_expert.tolist(), _mm_into, _add_mm)
    return out


def _mm_into(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Parts of the longest dimension are widened one after the other; the two others are widened whole."""
    if not is_widened(a):
        torch.mm(a, b, out=out)
        return
    (rows, inner), columns = a.shape, b.shape[1]
    longest = max(rows, inner, columns)
    size = max(_MIN_WIDE, _WIDE_ELEMENTS // (rows + inner + columns - longest))
    if longest == inner:
        sums = torch.zeros(rows, columns, device=a.device)
        for a_part, b_part in zip(a.split(size, 1), b.split(size), strict=True):
            sums.addmm_(a_part.float(), b_part.float())
        out.copy_(sums)
    elif longest == columns:
        wide_a = a.float()
        for b_part, out_part in zip(b.split(size, 1), out.split(size, 1), strict=True):
            out_part.copy_(torch.mm(wide_a, b_part.float()))
    else:
        wide_b = b.float()
        for a_part, out_part in zip(a.split(size), out.split(size), strict=True):
            out_part.copy_(torch.mm(a_part.float(), wide_b))


def _add_mm(a: Tensor, b: Tensor, sums: Tensor) -> None:
    """Add ``a @ b`` to ``sums``, which may be of another dtype."""
    if a.dtype == sums.dtype and not is_widened(a):
        sums.addmm_(a, b)
    elif is_widened(a):
        sums.add_(torch.mm(a.float(), b.float()))
    else:
        sums.add_(torch.mm(a, b))

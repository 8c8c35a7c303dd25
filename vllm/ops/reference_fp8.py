"""The specification of products of FP8 activations with FP8 weights, as in DeepSeek-V3's training (arXiv:2412.19437,
sec. 3.3). 128 channels C of a token become x = a_C x8 with e4m3 values x8 and the fp32 scale a_C = max|x| / 448; then

    out[t, o] = sum over C of a_C[t] b_C[o] sum over i in C of x8[t, i] w8[o, i]

with the weight's scales b_C of 128 x 128 blocks, all sums in fp32, rounded once to the dtype of x. A device adds the
products of 128 channels with fewer bits than fp32 has (14 on Hopper).

Letters: T tokens, I inputs, C blocks of 128 inputs, O outputs, E experts, K experts per token, H hidden size, F expert
width.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hf_formats.fp8 import BLOCK, FP8_DTYPE, FP8_MAX, scales_of_peaks
from vllm.ops.contract import Choices, ExpertMatrices
from vllm.ops.reference_moe import silu_and_mul
from vllm.ops.weights import Fp8Operand


def quantize_rows(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 [T, I] and the scales, fp32 [T, C]; a scale is 1 where all channels are nearly 0."""
    x_TCi = x_TI.float().unflatten(1, (-1, BLOCK))
    scale_TC = scales_of_peaks(x_TCi.abs().amax(-1))
    scaled_TCi = (x_TCi / scale_TC[..., None]).clamp_(-FP8_MAX, FP8_MAX)
    return scaled_TCi.flatten(1).to(FP8_DTYPE), scale_TC


def linear(x_TI: Tensor, weight_OI: Fp8Operand) -> Tensor:
    """[T, O] in the dtype of the weight's products."""
    values_TI, scale_TC = quantize_rows(x_TI.to(weight_OI.dtype))
    x_CTi = values_TI.float().unflatten(1, (-1, BLOCK)).transpose(0, 1)
    weight_COi = weight_OI.values.float().unflatten(1, (-1, BLOCK)).transpose(0, 1)
    scale_OC = weight_OI.scales.scale_inv.index_select(0, weight_OI.scales.row_blocks_R)
    products_CTO = torch.bmm(x_CTi, weight_COi.transpose(1, 2))
    return (products_CTO * scale_TC.T[:, :, None] * scale_OC.T[:, None, :]).sum(0).to(weight_OI.dtype)


def fused_experts(x_TH: Tensor, matrices: ExpertMatrices, choices: Choices, first_expert: int) -> Tensor:
    """See ``RolloutOps.fused_experts``: what lies between the two products is rounded, and quantised from that."""
    w13_E2FH, w2_EHF = matrices
    weights_TK, ids_TK = choices
    out_TH = torch.zeros_like(x_TH)
    for expert in range(len(w13_E2FH)):
        tokens_S, choices_S = (ids_TK == first_expert + expert).nonzero(as_tuple=True)
        inner_SF = silu_and_mul(linear(x_TH[tokens_S], _expert_of(w13_E2FH, expert)))
        y_SH = linear(inner_SF, _expert_of(w2_EHF, expert))
        out_TH.index_add_(0, tokens_S, y_SH * weights_TK[tokens_S, choices_S, None].to(y_SH.dtype))
    return out_TH


def grouped(x_SI: Tensor, weight_EOI: Fp8Operand, ends_E: Tensor) -> Tensor:
    """[S, O]: each expert's matrix by its rows, which end where `ends` says."""
    rows = x_SI.tensor_split(ends_E[:-1].long().cpu())
    return torch.cat([linear(x, _expert_of(weight_EOI, expert)) for expert, x in enumerate(rows)])


def _expert_of(weight_EOI: Fp8Operand, expert: int) -> Fp8Operand:
    scales = replace(weight_EOI.scales, scale_inv=weight_EOI.scales.scale_inv[expert])
    return Fp8Operand(weight_EOI.values[expert], scales)

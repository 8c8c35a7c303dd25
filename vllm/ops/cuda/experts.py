"""The experts of this rank on NVIDIA devices: torch sorts choices by expert and multiplies bfloat16 with
`torch.nn.functional.grouped_mm`, whose groups end where a tensor on the device says; routing, the weighted sum and the
products of other dtypes, FP8 too (``fp8.py``), are kernels. Nothing waits for the device, and no shape depends on the
routing: rows of other ranks' experts are sorted to the end and not multiplied.

Limits: at most 32,767 experts. grouped_mm wants rows of whole 16 bytes; others take the kernel, several times slower
for many rows. Tolerance: 1e-5 (float32), 1e-2 (bfloat16).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.ops.contract import Choices, ExpertMatrices, RouterSettings
from vllm.ops.cuda.fp8 import Fp8Products
from vllm.ops.cuda.launch import Launch, tile_for
from vllm.ops.cuda.rows import RowOps
from vllm.ops.weights import Fp8Operand

_GROUPED_MM_STEP = 8  # sizes that are 16 bytes of bfloat16
_MOST_CHOICES = 1 << 15  # at a time: each is a row of x and of two products, whoever holds its expert


class ExpertOps:
    """See ``RolloutOps.topk_router`` and ``fused_experts``."""

    def __init__(self, launch: Launch, rows: RowOps, fp8: Fp8Products) -> None:
        self._launch, self._rows, self._fp8 = launch, rows, fp8

    def topk_router(self, logits_TE: Tensor, bias_E: Tensor | None, routing: RouterSettings) -> Choices:
        top_k, num_groups, topk_groups, normalize, scaling, scoring = routing
        assert logits_TE.dtype is torch.float32 and scoring in ("sigmoid", "softmax"), (logits_TE.dtype, scoring)
        logits_TE = logits_TE.contiguous()
        tokens, num_experts = logits_TE.shape
        weights_TK = logits_TE.new_empty(tokens, top_k)
        ids_TK = logits_TE.new_empty(tokens, top_k, dtype=torch.int64)
        groups = num_groups if topk_groups < num_groups else 1
        self._launch(
            "topk_router",
            (tokens,),
            *(logits_TE, logits_TE if bias_E is None else bias_E.contiguous(), weights_TK, ids_TK, float(scaling)),
            IS_SOFTMAX=scoring == "softmax",
            HAS_BIAS=bias_E is not None,
            NORMALIZES=normalize,
            K=top_k,
            GROUPS=groups,
            KEPT_GROUPS=min(topk_groups, groups),
            E=num_experts // groups,
            TILE_K=tile_for(top_k),
            TILE_G=tile_for(groups),
            TILE_E=tile_for(num_experts // groups),
            num_warps=1 if num_experts <= 256 else 4,
        )
        return weights_TK, ids_TK

    def fused_experts(self, x_TH: Tensor, matrices: ExpertMatrices, choices: Choices, first_expert: int) -> Tensor:
        weights_TK, ids_TK = choices
        out_TH = x_TH.new_empty(x_TH.shape)
        most_tokens = max(1, _MOST_CHOICES // ids_TK.shape[1])
        for start in range(0, len(x_TH), most_tokens):
            part = slice(start, start + most_tokens)
            chosen = weights_TK[part].contiguous(), ids_TK[part] - first_expert
            self._write_experts(x_TH[part], matrices, chosen, out_TH[part])
        return out_TH

    def _write_experts(self, x_TH: Tensor, matrices: ExpertMatrices, choices: Choices, out_TH: Tensor) -> None:
        """`fused_experts` of a few tokens; ids count from this rank's first expert."""
        w13_E2FH, w2_EHF = matrices
        weights_TK, ids_TK = choices
        num_experts, (tokens, hidden) = len(w13_E2FH), x_TH.shape
        is_elsewhere_TK = (ids_TK < 0) | (ids_TK >= num_experts)
        experts_S = ids_TK.masked_fill(is_elsewhere_TK, num_experts).flatten().to(torch.int16)
        sorted_S, order_S = experts_S.sort(stable=True)
        experts_E = torch.arange(num_experts, dtype=torch.int16, device=x_TH.device)
        ends_E = torch.searchsorted(sorted_S, experts_E, right=True, out_int32=True)
        place_S = torch.empty_like(order_S)
        place_S.scatter_(0, order_S, torch.arange(len(order_S), device=x_TH.device))
        tokens_S = order_S // ids_TK.shape[1]
        if isinstance(w13_E2FH, Fp8Operand):
            gate_up_S2F = self._fp8.grouped(self._fp8.quantize(x_TH), w13_E2FH, ends_E, tokens_S)
        else:
            gate_up_S2F = self._grouped_product(x_TH.index_select(0, tokens_S), w13_E2FH, ends_E)
        if isinstance(w2_EHF, Fp8Operand):
            inner = self._fp8.silu_and_mul(gate_up_S2F, ends_E[-1:])
            product_SH = self._fp8.grouped(inner, w2_EHF, ends_E, None)
        else:
            product_SH = self._grouped_product(self._rows.silu_and_mul(gate_up_S2F), w2_EHF, ends_E)
        tile = min(tile_for(hidden), 1024)
        self._launch(
            "sum_of_experts",
            (tokens, -(-hidden // tile)),
            *(product_SH, place_S, ends_E[-1:], weights_TK, out_TH),
            K=ids_TK.shape[1],
            H=hidden,
            TILE_H=tile,
        )

    def _grouped_product(self, x_SI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
        """[S, O]; rows past the last end are anything."""
        experts, outputs, inputs = weight_EOI.shape
        are_whole_steps = inputs % _GROUPED_MM_STEP == 0 and outputs % _GROUPED_MM_STEP == 0
        # An older torch only plans with this table: `rollout_ops` refuses it.
        if x_SI.dtype is torch.bfloat16 and are_whole_steps and hasattr(F, "grouped_mm"):
            return F.grouped_mm(x_SI, weight_EOI.transpose(1, 2), offs=ends_E)
        out_SO = x_SI.new_empty(len(x_SI), outputs)
        is_float32 = x_SI.dtype is torch.float32
        tile_S, tile_O, tile_I = 16, 32 if is_float32 else 64, 32 if is_float32 else 64
        self._launch(
            "grouped_product",
            (-(-len(x_SI) // tile_S) + experts, -(-outputs // tile_O)),
            *(x_SI, weight_EOI, *weight_EOI.stride(), ends_E, out_SO),
            E=experts,
            O=outputs,
            I=inputs,
            TILE_E=tile_for(experts),
            TILE_S=tile_S,
            TILE_O=tile_O,
            TILE_I=tile_I,
        )
        return out_SO

"""Routing and routed experts on a CPU.

Letters: T tokens, H hidden size, F expert width, E experts, K experts per token, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.distributed.parallel_state import GroupCoordinator
from vllm.ops.cpu.calls import KernelCalls, last_contiguous
from vllm.ops.cpu.compressed import CompressedWeight
from vllm.ops.reference_exchange import all_to_all_experts
from vllm.ops.weights import Weight


class ExpertOps:
    """See ``RolloutOps.topk_router``, ``fused_experts`` and ``exchanged_experts``."""

    def __init__(self, calls: KernelCalls) -> None:
        self._calls = calls

    def topk_router(
        self,
        logits_TE: Tensor,
        bias_E: Tensor | None,
        top_k: int,
        num_groups: int,
        topk_groups: int,
        normalize: bool,
        scaling: float,
        scoring: str = "sigmoid",
    ) -> tuple[Tensor, Tensor]:
        assert logits_TE.dtype == torch.float32 and scoring in ("sigmoid", "softmax"), (logits_TE.dtype, scoring)
        logits_TE = logits_TE.contiguous()
        rows, experts = logits_TE.shape
        weights_TK = logits_TE.new_empty(rows, top_k)
        ids_TK = logits_TE.new_empty(rows, top_k, dtype=torch.int64)
        self._calls.run(
            "cpu_topk_router",
            logits_TE.data_ptr(),
            None if bias_E is None else bias_E.data_ptr(),
            rows,
            experts,
            top_k,
            num_groups,
            topk_groups,
            int(normalize),
            scaling,
            int(scoring == "softmax"),
            weights_TK.data_ptr(),
            ids_TK.data_ptr(),
        )
        return weights_TK, ids_TK

    def fused_experts(
        self,
        x_TH: Tensor,
        w13_E2FH: Weight,
        w2_EHF: Weight,
        weights_TK: Tensor,
        ids_TK: Tensor,
        first_expert: int,
    ) -> Tensor:
        out_TH = self._calls.empty(x_TH, *x_TH.shape)
        if len(x_TH) == 0:
            return out_TH
        x_TH, weights_TK, ids_TK = last_contiguous(x_TH), weights_TK.float().contiguous(), ids_TK.contiguous()
        if is_compressed := isinstance(w2_EHF, CompressedWeight):
            assert isinstance(w13_E2FH, CompressedWeight) and w13_E2FH.num_parts == 2
            assert self._calls.takes_rows(x_TH.dtype)
            experts, hidden, width = w2_EHF.num_experts, w2_EHF.rows, w2_EHF.columns
            mode, w13, w2 = self._calls.mode(x_TH), w13_E2FH.addresses().ctypes.data, w2_EHF.addresses().ctypes.data
        else:
            assert isinstance(w13_E2FH, Tensor) and isinstance(w2_EHF, Tensor)
            experts, hidden, width = w2_EHF.shape
            in_order = torch.Tensor.contiguous if self._calls.takes_rows(x_TH.dtype) else _in_out
            weights = in_order(w13_E2FH), in_order(w2_EHF)
            mode = self._calls.mode(x_TH, *weights)
            w13, w2 = (weight.data_ptr() for weight in weights)
        self._calls.run(
            "cpu_fused_experts",
            mode,
            x_TH.data_ptr(),
            x_TH.stride(0),
            *ids_TK.shape,
            weights_TK.data_ptr(),
            ids_TK.data_ptr(),
            w13,
            w2,
            int(is_compressed),
            experts,
            hidden,
            width,
            first_expert,
            out_TH.data_ptr(),
        )
        return out_TH

    def exchanged_experts(
        self,
        x_TH: Tensor,
        w13_E2FH: Weight,
        w2_EHF: Weight,
        weights_TK: Tensor,
        ids_TK: Tensor,
        num_active: int,
        group: GroupCoordinator,
    ) -> Tensor:
        return all_to_all_experts(x_TH, w13_E2FH, w2_EHF, weights_TK, ids_TK, num_active, group, self.fused_experts)


def _in_out(weight_EOI: Tensor) -> Tensor:
    """The same matrices with memory [E, I, O]: a view, or a copy."""
    return weight_EOI.transpose(1, 2).contiguous().transpose(1, 2)

"""RouterSettings and routed experts on a CPU.

Letters: T tokens, H hidden size, F expert width, E experts, K experts per token, I inputs, O outputs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm.ops.contract import Choices, ExpertMatrices, RouterSettings
from vllm.ops.cpu.calls import KernelCalls
from vllm.ops.cpu.compressed import CompressedWeight
from vllm.ops.cpu.panels import PanelWeight
from vllm.utils import last_contiguous


class ExpertOps:
    """See ``RolloutOps.topk_router`` and ``fused_experts``."""

    def __init__(self, calls: KernelCalls) -> None:
        self._calls = calls

    def topk_router(self, logits_TE: Tensor, bias_E: Tensor | None, routing: RouterSettings) -> Choices:
        top_k, num_groups, topk_groups, normalize, scaling, scoring = routing
        assert logits_TE.dtype == torch.float32 and scoring in ("sigmoid", "softmax"), (logits_TE.dtype, scoring)
        logits_TE = logits_TE.contiguous()
        weights_TK = logits_TE.new_empty(len(logits_TE), top_k)
        ids_TK = logits_TE.new_empty(len(logits_TE), top_k, dtype=torch.int64)
        how = top_k, num_groups, topk_groups, int(normalize), scaling, int(scoring == "softmax")
        self._calls.run("cpu_topk_router", logits_TE, bias_E, *logits_TE.shape, *how, weights_TK, ids_TK)
        return weights_TK, ids_TK

    def fused_experts(self, x_TH: Tensor, matrices: ExpertMatrices, choices: Choices, first_expert: int) -> Tensor:
        w13_E2FH, w2_EHF = matrices
        weights_TK, ids_TK = choices
        out_TH = self._calls.empty(x_TH, *x_TH.shape)
        if len(x_TH) == 0:
            return out_TH
        x_TH, weights_TK, ids_TK = last_contiguous(x_TH), weights_TK.float().contiguous(), ids_TK.contiguous()
        weights: tuple[Tensor | np.ndarray | int, ...]  # and whether they are addresses
        if isinstance(w2_EHF, CompressedWeight | PanelWeight):
            assert type(w13_E2FH) is type(w2_EHF) and w13_E2FH.num_parts == 2
            is_panels = isinstance(w2_EHF, PanelWeight)
            assert self._calls.takes_panels(x_TH.dtype) if is_panels else self._calls.takes_rows(x_TH.dtype)
            experts, hidden, width = w2_EHF.num_experts, w2_EHF.rows, w2_EHF.columns
            mode, weights = self._calls.mode(x_TH), (w13_E2FH.addresses(), w2_EHF.addresses(), 1)
        else:
            assert isinstance(w13_E2FH, Tensor) and isinstance(w2_EHF, Tensor)
            experts, hidden, width = w2_EHF.shape
            in_order = torch.Tensor.contiguous if self._calls.takes_rows(x_TH.dtype) else _in_out
            w13, w2 = in_order(w13_E2FH), in_order(w2_EHF)
            mode, weights = self._calls.mode(x_TH, w13, w2), (w13, w2, 0)
        chosen = *ids_TK.shape, weights_TK, ids_TK
        sizes = experts, hidden, width, first_expert
        self._calls.run("cpu_fused_experts", mode, x_TH, x_TH.stride(0), *chosen, *weights, *sizes, out_TH)
        return out_TH


def _in_out(weight_EOI: Tensor) -> Tensor:
    """The same matrices with memory [E, I, O]: a view, or a copy."""
    return weight_EOI.transpose(1, 2).contiguous().transpose(1, 2)

"""The routed experts of this rank: sort, two grouped matmuls, weighted sum, one kernel each, no wait for the device.

Limits: float16, bfloat16 or float32; at most 512 choices of a token and 1024 experts. Rows of the other ranks' experts
are sorted to the end and carried along unmultiplied, so the shapes do not depend on the routing. Tolerance: 1e-2
(bfloat16), 1e-5 (float32).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops.contract import Choices, ExpertMatrices

# Codes of npu_grouped_matmul.
SPLIT_ROWS = 0  # group_type
ONE_OUTPUT = 3  # split_item
COUNTS = 1  # group_list_type


def fused_experts(x_TH: Tensor, matrices: ExpertMatrices, choices: Choices, first_expert: int) -> Tensor:
    """See ``RolloutOps.fused_experts``."""
    import torch_npu

    (w13_E2FH, w2_EHF), (weights_TK, ids_TK) = matrices, choices
    if len(x_TH) == 0:
        return torch.zeros_like(x_TH)
    num_experts = len(w13_E2FH)
    local_TK = ids_TK - first_expert
    is_elsewhere_TK = (local_TK < 0) | (local_TK >= num_experts)
    # masked_fill, because torch.where would leave its number in host memory for a captured graph.
    local_TK = local_TK.masked_fill(is_elsewhere_TK, num_experts)
    experts_E = torch.arange(num_experts, device=x_TH.device)
    counts_E = (local_TK.flatten().unsqueeze(1) == experts_E).sum(0)
    rows_SH, row_map_S = torch_npu.npu_moe_token_permute(x_TH, local_TK.int())
    hidden_SF = torch_npu.npu_swiglu(grouped_matmul(rows_SH, w13_E2FH, counts_E), dim=-1)
    out_SH = grouped_matmul(hidden_SF, w2_EHF, counts_E)
    # The kernel leaves the rows past the last group unwritten, and 0 * NaN would be NaN.
    is_elsewhere_S1 = (torch.arange(len(out_SH), device=x_TH.device) >= counts_E.sum()).unsqueeze(1)
    out_SH = out_SH.masked_fill(is_elsewhere_S1, 0)
    weights_TK = weights_TK.masked_fill(is_elsewhere_TK, 0.0)
    summed_TH: Tensor = torch_npu.npu_moe_token_unpermute(out_SH, row_map_S, probs=weights_TK)
    return summed_TH.to(x_TH.dtype)


def grouped_matmul(rows_SI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """[S, O]: rows come sorted by expert, counts_E of each; what lies past them stays unwritten."""
    import torch_npu

    product_SO: Tensor = torch_npu.npu_grouped_matmul(
        [rows_SI],
        [weight_EOI.transpose(1, 2)],
        group_list=counts_E,
        split_item=ONE_OUTPUT,
        group_type=SPLIT_ROWS,
        group_list_type=COUNTS,
    )[0]
    return product_SO

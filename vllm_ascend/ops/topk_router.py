"""DeepSeek-V3's routing as one kernel; softmax scores (DeepSeek-V2) run the reference, as in training: the versions of
the kernel differ in whether they divide those by their sum.

Limits: float32 logits; CANN 8.2 takes DeepSeek-V3's shape only (256 experts in 8 groups, 4 kept, up to 32 choices),
CANN 8.5 up to 2048 experts with more than 2 in a group, a group's number rounded up to a multiple of 32. Tolerance: the
same experts except where scores tie, weights 1e-6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm.ops import reference_moe
from vllm.ops.contract import Choices, RouterSettings

# Codes of npu_moe_gating_top_k.
SIGMOID = 1  # norm_type
SUM_OF_BEST_TWO = 1  # group_select_mode
NORMALISE_THEN_CHOOSE = 0  # renorm, the only one there is


def topk_router(logits_TE: Tensor, bias_E: Tensor | None, routing: RouterSettings) -> Choices:
    """See ``RolloutOps.topk_router``."""
    if routing.scoring != "sigmoid":
        return reference_moe.topk_router(logits_TE, bias_E, routing)
    import torch_npu

    bias_E = torch.zeros_like(logits_TE[0]) if bias_E is None else bias_E
    weights_TK, ids_TK, _ = torch_npu.npu_moe_gating_top_k(
        logits_TE,
        routing.top_k,
        bias=bias_E.to(logits_TE.dtype),
        k_group=routing.topk_groups,
        group_count=routing.num_groups,
        group_select_mode=SUM_OF_BEST_TWO,
        renorm=NORMALISE_THEN_CHOOSE,
        norm_type=SIGMOID,
        routed_scaling_factor=routing.scaling,
        eps=1e-20,
    )
    ids_TK = ids_TK.long()
    if not routing.normalize:  # the kernel always divides by the sum
        weights_TK = logits_TE.gather(1, ids_TK).sigmoid() * routing.scaling
    return weights_TK, ids_TK

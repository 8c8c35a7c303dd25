"""The router's choice of experts as one kernel; their weights stay in torch, because the kernel has no gradient.

Limits (sigmoid scores): float32 logits and bias; CANN 8.2 takes DeepSeek-V3's shape only (256 experts in 8 groups, 4
kept, up to 32 choices), CANN 8.5 up to 2048 experts. Softmax scores have no fused form with DeepSeek's groups: they
run the reference. Tolerance: the same experts except where scores tie, weights 1e-6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.ops import reference_moe
from megatron.core.ops.contract import RouterRule

# Codes of npu_moe_gating_top_k.
SIGMOID = 1  # norm_type
SUM_OF_BEST_TWO = 1  # group_select_mode
NORMALISE_THEN_CHOOSE = 0  # renorm, the only one there is


def topk_router(
    logits_TE: Tensor, rule: RouterRule, expert_bias: Tensor | None = None, chosen_TK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See ``megatron.core.ops.contract.TopkRouter``."""
    if rule.score_function != "sigmoid" or logits_TE.shape[0] == 0:
        return reference_moe.topk_router(logits_TE, rule, expert_bias, chosen_TK)
    indices_TK = chosen_TK
    if indices_TK is None:
        indices_TK = _choose(logits_TE.detach(), rule, expert_bias)
    probs_TK = logits_TE.gather(1, indices_TK).sigmoid()
    if rule.norm_topk_prob and rule.topk > 1:
        probs_TK = probs_TK / (probs_TK.sum(-1, keepdim=True) + 1e-20)
    return (probs_TK if rule.scaling_factor is None else probs_TK * rule.scaling_factor), indices_TK


def _choose(logits_TE: Tensor, rule: RouterRule, expert_bias: Tensor | None) -> Tensor:
    import torch_npu

    has_groups = rule.num_groups is not None and rule.group_topk is not None
    bias = None if expert_bias is None else expert_bias.to(logits_TE.dtype)
    # NPU-ADAPTATION(gating-bias): CANN 8.2's kernel does not start without a bias;
    # drop when CANN 8.5 is the oldest supported.
    if bias is None:
        bias = torch.zeros_like(logits_TE[0])
    _, indices_TK, _ = torch_npu.npu_moe_gating_top_k(
        logits_TE,
        rule.topk,
        bias=bias,
        k_group=rule.group_topk if has_groups else 1,
        group_count=rule.num_groups if has_groups else 1,
        group_select_mode=SUM_OF_BEST_TWO,
        renorm=NORMALISE_THEN_CHOOSE,
        norm_type=SIGMOID,
    )
    chosen: Tensor = indices_TK.long()
    return chosen

"""Choosing experts, after "torch_npu.npu_moe_gating_top_k" and "aclnnMoeGatingTopK" of the Ascend documentation.

Limits: a bias is a must (CANN 8.2); the sizes are CANN 8.5's (CANN 8.2 takes 256 experts in 8 groups with 4 kept only).
The formula on the page adds the bias to the scores for good; what is returned is the score without it, as callers of
the op rely on. It also divides by the sum for both norms; softmax scores are not divided here, because callers divide
them afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from npusim.reference import reference
from npusim.references.checks import require, require_floats, unwritten

OP = "npu_moe_gating_top_k"
SOFTMAX, SIGMOID = 0, 1  # norm_type
BEST, SUM_OF_BEST_TWO = 0, 1  # group_select_mode
MAX_EXPERTS, MAX_CHOICES, GROUP_STEP = 2048, 32, 32


@reference("npu_moe_gating_top_k")
def moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """logits [T, E] -> (weights [T, k] in their dtype, experts int32 [T, k], scores float32 [T, E] if out_flag)."""
    _check(x, k, bias, k_group, group_count, group_select_mode, renorm, norm_type)
    require(input_ids is None and tid2eid is None, OP, "a table of experts is not simulated")
    assert bias is not None
    scores = x.float().sigmoid() if norm_type == SIGMOID else x.float().softmax(-1)
    best = _choose(scores + bias.float(), k, k_group, group_count, group_select_mode)
    weights = scores.gather(1, best)
    if norm_type == SIGMOID:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    out = scores if out_flag else unwritten(scores, *scores.shape)
    return (weights * routed_scaling_factor).to(x.dtype), best.int(), out


def _choose(biased_TE: Tensor, k: int, k_group: int, group_count: int, mode: int) -> Tensor:
    """[T, k] the best experts of each token's k_group best groups; the lower index first where scores tie."""
    groups_TGe = biased_TE.unflatten(1, (group_count, -1)).sort(-1, descending=True).values
    group_scores_TG = groups_TGe[..., :2].sum(-1) if mode == SUM_OF_BEST_TWO else groups_TGe[..., 0]
    rank_TG = group_scores_TG.argsort(descending=True, stable=True).argsort()
    is_open_TE = (rank_TG < k_group).repeat_interleave(groups_TGe.shape[-1], 1)
    return torch.where(is_open_TE, biased_TE, float("-inf")).argsort(descending=True, stable=True)[:, :k]


def _check(
    x: Tensor, k: int, bias: Tensor | None, k_group: int, groups: int, mode: int, renorm: int, norm: int
) -> None:
    require(x.dim() == 2 and x.numel() > 0, OP, f"wants logits [T, E], got {tuple(x.shape)}")
    require(bias is not None, OP, "wants a bias")
    assert bias is not None
    require_floats(OP, x, bias)
    experts = x.shape[1]
    require(tuple(bias.shape) == (experts,), OP, f"bias of {tuple(bias.shape)} for {experts} experts")
    require(renorm == 0, OP, f"renorm {renorm}; 0 is the only one")
    require(
        norm in (SOFTMAX, SIGMOID) and mode in (BEST, SUM_OF_BEST_TWO), OP, f"norm {norm}, group_select_mode {mode}"
    )
    require(mode != BEST or norm == SOFTMAX, OP, "group_select_mode 0 goes with softmax only")
    require(experts <= MAX_EXPERTS and groups > 0 and experts % groups == 0, OP, f"{experts} experts, {groups} groups")
    size = experts // groups
    require(size > mode, OP, f"a group of {size} experts")
    aligned = -(-size // GROUP_STEP) * GROUP_STEP * groups
    require(aligned <= MAX_EXPERTS, OP, f"{groups} groups aligned to {GROUP_STEP} make {aligned} experts")
    require(1 <= k_group <= groups and 1 <= k <= min(size * k_group, MAX_CHOICES), OP, f"k {k}, k_group {k_group}")

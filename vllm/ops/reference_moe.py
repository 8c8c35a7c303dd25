"""Reference MoE ops: DeepSeek's routing, the experts of this rank, and those of a group by two uneven all-to-alls.

Letters: T tokens of this rank, S its choices (token and expert), A choices that arrive here, G ranks of the group.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.distributed.parallel_state import GroupCoordinator
from vllm.ops.contract import Choices, ExpertMatrices, FusedExperts, RouterSettings


def silu_and_mul(x_T2F: Tensor) -> Tensor:
    gate_TF, up_TF = x_T2F.chunk(2, dim=-1)
    return F.silu(gate_TF).mul_(up_TF)


def topk_router(logits_TE: Tensor, bias_E: Tensor | None, routing: RouterSettings) -> Choices:
    top_k, num_groups, topk_groups, normalize, scaling, scoring = routing
    assert scoring in ("sigmoid", "softmax"), scoring
    scores_TE = logits_TE.sigmoid() if scoring == "sigmoid" else logits_TE.softmax(-1)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if topk_groups < num_groups:
        grouped_TGe = choice_TE.view(len(choice_TE), num_groups, -1)
        best_of_group = min(2 if scoring == "sigmoid" else 1, grouped_TGe.shape[-1])
        group_scores_TG = grouped_TGe.topk(best_of_group, dim=-1, sorted=False).values.sum(-1)
        kept_TG = group_scores_TG.topk(topk_groups, dim=-1, sorted=False).indices
        dropped_TG = torch.ones_like(group_scores_TG, dtype=torch.bool).scatter_(1, kept_TG, False)
        choice_TE = grouped_TGe.masked_fill(dropped_TG[..., None], float("-inf")).view_as(choice_TE)
    ids_TK = choice_TE.topk(top_k, dim=-1, sorted=False).indices
    weights_TK = scores_TE.gather(1, ids_TK)
    if normalize:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return weights_TK * scaling, ids_TK


def fused_experts(x_TH: Tensor, matrices: ExpertMatrices, choices: Choices, first_expert: int) -> Tensor:
    w13_E2FH, w2_EHF = matrices
    weights_TK, ids_TK = choices
    num_experts, top_k = len(w13_E2FH), ids_TK.shape[1]
    out_TH = torch.zeros_like(x_TH)
    experts_S = ids_TK.reshape(-1) - first_expert
    # Choices sorted by expert; those of other ranks sort before 0 or after the last and are cut off.
    order_S = experts_S.argsort(stable=True)
    bounds = torch.searchsorted(
        experts_S[order_S], torch.arange(num_experts + 1, device=x_TH.device, dtype=experts_S.dtype)
    ).tolist()
    order_S = order_S[bounds[0] : bounds[-1]]
    if len(order_S) == 0:
        return out_TH
    tokens_S = torch.div(order_S, top_k, rounding_mode="floor")
    x_SH = x_TH.index_select(0, tokens_S)
    gate_up_S2F = x_SH.new_empty(len(x_SH), w13_E2FH.shape[1])
    y_SH = torch.empty_like(x_SH)
    counts = [stop - start for start, stop in itertools.pairwise(bounds)]
    _segment_products(x_SH, w13_E2FH, counts, gate_up_S2F)
    _segment_products(silu_and_mul(gate_up_S2F), w2_EHF, counts, y_SH)
    y_SH.mul_(weights_TK.reshape(-1).index_select(0, order_S)[:, None].to(y_SH.dtype))
    return out_TH.index_add_(0, tokens_S, y_SH)


def _segment_products(x_SI: Tensor, weights_EOI: Tensor, counts: list[int], out_SO: Tensor) -> None:
    """Rows of x come in one segment per expert, of `counts` rows.

    Each is multiplied with its expert's matrix into `out_SO`.
    """
    segments = zip(x_SI.split(counts), weights_EOI.transpose(1, 2).unbind(), out_SO.split(counts), strict=True)
    for x_sI, weight_IO, out_sO in segments:
        if len(x_sI) > 0:
            torch.mm(x_sI, weight_IO, out=out_sO)


def all_to_all_experts(
    x_TH: Tensor,
    matrices: ExpertMatrices,
    choices: Choices,
    num_active: int,
    group: GroupCoordinator,
    experts: FusedExperts,
) -> Tensor:
    """`exchanged_experts` with any table's `fused_experts` for the work in between; waits for the device once, to learn
    how many choices go where.
    """
    weights_TK, ids_TK = choices
    num_here, top_k = len(matrices[0]), ids_TK.shape[1]
    ids_S = ids_TK[:num_active].reshape(-1)
    order_S = ids_S.float().argsort(stable=True)  # by expert, and so by rank; accelerators do not sort integers
    sent_G = torch.bincount(ids_S // num_here, minlength=group.world_size)
    counts_2G = torch.stack((sent_G, group.all_to_all(sent_G))).tolist()
    tokens_S = torch.div(order_S, top_k, rounding_mode="floor")
    rows_AH = group.all_to_all(x_TH.index_select(0, tokens_S), *counts_2G)
    ids_A1 = group.all_to_all(ids_S[order_S], *counts_2G).unsqueeze(1)
    chosen_A1 = weights_TK.new_ones(len(rows_AH), 1), ids_A1
    done_AH = experts(rows_AH, matrices, chosen_A1, group.rank_in_group * num_here)
    done_SH = group.all_to_all(done_AH, *reversed(counts_2G))
    weights_S = weights_TK[:num_active].reshape(-1).index_select(0, order_S)
    done_SH = done_SH * weights_S.unsqueeze(1).to(done_SH.dtype)
    return torch.zeros_like(x_TH).index_add_(0, tokens_S, done_SH)

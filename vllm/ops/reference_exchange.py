"""Reference of the experts of a whole group: tokens travel to their experts and back by two uneven all-to-alls.

Letters: T tokens of this rank, S its choices (token and expert), A choices that arrive here, G ranks of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm.distributed.parallel_state import GroupCoordinator
from vllm.ops.reference_moe import fused_experts

FusedExperts = Callable[[Tensor, Any, Any, Tensor, Tensor, int], Tensor]


def exchanged_experts(
    x_TH: Tensor,
    w13_E2FH: Tensor,
    w2_EHF: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    num_active: int,
    group: GroupCoordinator,
) -> Tensor:
    return all_to_all_experts(x_TH, w13_E2FH, w2_EHF, weights_TK, ids_TK, num_active, group, fused_experts)


def all_to_all_experts(
    x_TH: Tensor,
    w13_E2FH: Any,
    w2_EHF: Any,
    weights_TK: Tensor,
    ids_TK: Tensor,
    num_active: int,
    group: GroupCoordinator,
    experts: FusedExperts,
) -> Tensor:
    """`exchanged_experts` with any table's `fused_experts` for the work in between; waits for the device once, to learn
    how many choices go where.
    """
    num_here, top_k = len(w13_E2FH), ids_TK.shape[1]
    ids_S = ids_TK[:num_active].reshape(-1)
    order_S = ids_S.argsort(stable=True)  # by expert, and so by rank
    sent_G = torch.bincount(ids_S // num_here, minlength=group.world_size)
    counts_2G = torch.stack((sent_G, group.all_to_all(sent_G))).tolist()
    tokens_S = torch.div(order_S, top_k, rounding_mode="floor")
    rows_AH = group.all_to_all(x_TH.index_select(0, tokens_S), *counts_2G)
    ids_A1 = group.all_to_all(ids_S[order_S], *counts_2G).unsqueeze(1)
    done_AH = experts(
        rows_AH, w13_E2FH, w2_EHF, weights_TK.new_ones(len(rows_AH), 1), ids_A1, group.rank_in_group * num_here
    )
    done_SH = group.all_to_all(done_AH, *reversed(counts_2G))
    weights_S = weights_TK[:num_active].reshape(-1).index_select(0, order_S)
    done_SH = done_SH * weights_S.unsqueeze(1).to(done_SH.dtype)
    return torch.zeros_like(x_TH).index_add_(0, tokens_S, done_SH)

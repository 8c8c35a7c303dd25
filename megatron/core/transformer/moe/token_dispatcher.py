"""Brings tokens to the ranks of their experts and the results back, by all-to-all over the expert-parallel group.

Letters: T tokens of this rank, H hidden, K experts of a token, E experts, L experts of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.core.ops import TrainOps
from megatron.core.parallel_state import ProcessGroups
from megatron.core.tensor_parallel import collectives
from megatron.core.tensor_parallel.mappings import all_to_all


@dataclass(frozen=True)
class DispatchPlan:
    """How one layer's tokens travelled, so that their results find the way back.

    row_map: order of this rank's own rows · send, receive: rows to and from each EP rank (None: EP is 1) · expert_map:
    order of the received rows by local expert (None: they came in order).
    """

    row_map: torch.Tensor
    probs_TK: torch.Tensor
    send: list[int] | None = None
    receive: list[int] | None = None
    expert_map: torch.Tensor | None = None


class MoEAlltoAllTokenDispatcher:
    """Sort by expert, exchange over ``groups.ep``, sort the received rows by local expert; and the same backwards.

    The group holds the TP ranks too (expert TP is 1): each of them sends the tokens of its own sequence shard.
    Probabilities stay at home and are applied when the results are back.
    """

    def __init__(self, num_experts: int, groups: ProcessGroups, ops: TrainOps) -> None:
        self.group = groups.ep
        self.num_local_experts = num_experts // groups.ep.size()
        self.ops = ops

    def token_permutation(
        self, x_TH: torch.Tensor, probs_TK: torch.Tensor, indices_TK: torch.Tensor, counts_E: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, DispatchPlan]:
        """-> (rows sorted by local expert, int64 [L] rows of each local expert, the way back)."""
        rows, row_map = self.ops.token_permute(x_TH, indices_TK)
        if self.group.size() == 1:
            return rows, counts_E, DispatchPlan(row_map, probs_TK)
        counts_SE = collectives.all_gather(counts_E.unsqueeze(0), self.group)[0]
        counts_SE = counts_SE.cpu()  # the one wait for the device: split sizes must be known on the host
        first = self.group.rank() * self.num_local_experts
        counts_SL = counts_SE[:, first : first + self.num_local_experts]  # rows from each source rank
        send = counts_SE[self.group.rank()].view(-1, self.num_local_experts).sum(1).tolist()
        receive = counts_SL.sum(1).tolist()
        rows = all_to_all(self.group, rows, receive, send)
        expert_map = None
        if self.num_local_experts > 1:
            rows, expert_map = self.ops.token_permute(rows, self._local_experts(counts_SL, rows.device))
        return rows, counts_SL.sum(0), DispatchPlan(row_map, probs_TK, send, receive, expert_map)

    def token_unpermutation(self, rows: torch.Tensor, plan: DispatchPlan) -> torch.Tensor:
        """Results in the order of ``token_permutation``'s rows -> [T, H], each token's K results weighted and added."""
        if plan.expert_map is not None:
            rows = self.ops.token_unpermute(rows, plan.expert_map)
        if plan.send is not None and plan.receive is not None:
            rows = all_to_all(self.group, rows, plan.send, plan.receive)
        return self.ops.token_unpermute(rows, plan.row_map, plan.probs_TK)

    def _local_experts(self, counts_SL: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Local expert of every received row, [rows, 1]: rows come by source rank and, within it, by expert."""
        experts = torch.arange(self.num_local_experts).repeat(counts_SL.shape[0])
        return experts.repeat_interleave(counts_SL.flatten()).unsqueeze(1).to(device)

"""Brings tokens to the ranks of their experts and the results back, by all-to-all over the expert-parallel group.

Letters: T tokens of this rank, H hidden, K experts of a token, E experts, L experts of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.core.ops import TrainOps
from megatron.core.parallel_state import ProcessGroups
from megatron.core.tensor_parallel import collectives
from megatron.core.tensor_parallel.mappings import Exchange


@dataclass(frozen=True)
class Dispatch:
    """One layer's tokens while they travel, and how, so that their results find the way back.

    row_map: order of this rank's own rows · exchange: what sends rows to the EP ranks (None: EP is 1) · counts_SL: rows
    from each source rank for each local expert, on the host when there is an exchange.
    """

    row_map: torch.Tensor
    probs_TK: torch.Tensor
    counts_SL: torch.Tensor
    exchange: Exchange | None = None


class MoEAlltoAllTokenDispatcher:
    """Sort by expert, exchange over ``groups.ep``, sort the received rows by local expert; and the same backwards.

    The group holds the TP ranks too (expert TP is 1): each of them sends the tokens of its own sequence shard.
    Probabilities stay at home and are applied when the results are back. Each exchange has a start and a finish, so
    that the caller can compute something else in between.
    """

    def __init__(self, num_experts: int, groups: ProcessGroups, ops: TrainOps) -> None:
        self.group = groups.ep
        self.num_local_experts = num_experts // groups.ep.size()
        self.ops = ops

    def start_dispatch(
        self, x_TH: torch.Tensor, probs_TK: torch.Tensor, indices_TK: torch.Tensor, counts_E: torch.Tensor
    ) -> tuple[torch.Tensor, Dispatch]:
        """Send every token to its experts' ranks -> (rows for ``finish_dispatch``, how they travel)."""
        if self.group.size() == 1:
            rows, row_map = self.ops.token_permute(x_TH, indices_TK)
            return rows, Dispatch(row_map, probs_TK, counts_E.unsqueeze(0))
        counts_SE, counting = collectives.all_gather(counts_E.unsqueeze(0), self.group, async_op=True)
        rows, row_map = self.ops.token_permute(x_TH, indices_TK)  # beside the exchange of the counts
        assert counting is not None
        counting.wait()
        counts_SE = counts_SE.cpu()  # the one wait for the device: split sizes must be known on the host
        first = self.group.rank() * self.num_local_experts
        counts_SL = counts_SE[:, first : first + self.num_local_experts]
        send = counts_SE[self.group.rank()].view(-1, self.num_local_experts).sum(1).tolist()
        exchange = Exchange(self.group, output_split_sizes=counts_SL.sum(1).tolist(), input_split_sizes=send)
        return exchange.start(rows), Dispatch(row_map, probs_TK, counts_SL, exchange)

    def finish_dispatch(
        self, rows: torch.Tensor, dispatch: Dispatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """-> (rows sorted by local expert, int64 [L] rows of each, order of the received rows or None if as sorted)."""
        tokens_per_expert = dispatch.counts_SL.sum(0)
        if dispatch.exchange is None:
            return rows, tokens_per_expert, None
        rows = dispatch.exchange.finish(rows)
        if self.num_local_experts == 1:
            return rows, tokens_per_expert, None
        rows, expert_map = self.ops.token_permute(rows, self._local_experts(dispatch.counts_SL, rows.device))
        return rows, tokens_per_expert, expert_map

    def start_combine(
        self, rows: torch.Tensor, dispatch: Dispatch, expert_map: torch.Tensor | None
    ) -> tuple[torch.Tensor, Exchange | None]:
        """Send results, in the order of ``finish_dispatch``'s rows, home -> what ``finish_combine`` takes."""
        if expert_map is not None:
            rows = self.ops.token_unpermute(rows, expert_map)
        if dispatch.exchange is None:
            return rows, None
        there = dispatch.exchange
        back = Exchange(self.group, there.input_split_sizes, there.output_split_sizes)
        return back.start(rows), back

    def finish_combine(self, rows: torch.Tensor, back: Exchange | None, dispatch: Dispatch) -> torch.Tensor:
        """-> [T, H]: each token's K results weighted and added."""
        if back is not None:
            rows = back.finish(rows)
        return self.ops.token_unpermute(rows, dispatch.row_map, dispatch.probs_TK)

    def _local_experts(self, counts_SL: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Local expert of every received row, [rows, 1]: rows come by source rank and, within it, by expert."""
        experts = torch.arange(self.num_local_experts).repeat(counts_SL.shape[0])
        return experts.repeat_interleave(counts_SL.flatten()).unsqueeze(1).to(device)

"""Brings tokens to the ranks of their experts and the results back.

Letters: T tokens of this rank, H hidden, K experts of a token, E experts, L experts of this rank. A token's
probabilities are applied where its results are added up: at home (all-to-all) or beside the experts (all-gather).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron.core.ops import TrainOps
from megatron.core.parallel_state import ProcessGroups
from megatron.core.tensor_parallel import collectives
from megatron.core.tensor_parallel.mappings import Exchange
from megatron.core.transformer.moe.deep_ep_dispatcher import DeepEPTokenDispatcher
from megatron.core.transformer.moe.expert_load import ExpertLoad
from megatron.core.transformer.moe.uneven_rows import gather_rows, reduce_scatter_rows
from megatron.core.utils import async_h2d


class Dispatch(Protocol):
    """One layer's tokens in flight. Call each method once, in this order; work in between overlaps with them."""

    def finish(self) -> tuple[Tensor, Tensor]:
        """-> (rows [n, H] for this rank's experts, sorted by local expert; int64 [L] rows of each)."""

    def start_combine(self, rows: Tensor) -> None:
        """Send the experts' results home, in the order of ``finish``'s rows."""

    def finish_combine(self) -> Tensor:
        """-> [T, H]: each token's K results weighted and added."""


class MoETokenDispatcher(Protocol):
    """Exchanges the tokens of one layer; ``start_dispatch`` sends every token to its experts' ranks.

    load: of the dispatches, where more than one rank has experts.
    """

    load: ExpertLoad

    def start_dispatch(self, x_TH: Tensor, probs_TK: Tensor, indices_TK: Tensor, counts_E: Tensor) -> Dispatch: ...


class MoEAlltoAllTokenDispatcher:
    """Sort by expert, exchange over ``groups.ep``, gather over ``groups.etp``, sort by local expert; and back.

    Every rank sends its own tokens (a TP rank those of its sequence shard). With expert TP the ranks of ``groups.etp``
    hold slices of the same experts: each of them computes with the rows of all, and partial results are added when
    they are scattered back.
    """

    def __init__(self, num_experts: int, groups: ProcessGroups, ops: TrainOps) -> None:
        self.ep, self.etp = groups.ep, groups.etp
        self.num_local_experts = num_experts // groups.ep.size()
        self.ops = ops
        # The smaller group is used where it suffices: each group has buffers of its own on a device.
        self.counting = groups.ep if groups.etp.size() == 1 else groups.etp_ep
        self.members_TS = _members_by_place(groups)
        self.load = ExpertLoad()

    def start_dispatch(self, x_TH: Tensor, probs_TK: Tensor, indices_TK: Tensor, counts_E: Tensor) -> Dispatch:
        """Start: the exchange of counts overlaps with sorting, the exchange of rows runs until ``finish``."""
        if self.counting.size() == 1:
            rows, row_map = self.ops.token_permute(x_TH, indices_TK)
            return _AlltoAllDispatch(self, rows, row_map, probs_TK, counts_E[None, None], None)
        counts_RE, counting = collectives.all_gather(counts_E.unsqueeze(0), self.counting, async_op=True)
        rows, row_map = self.ops.token_permute(x_TH, indices_TK)
        assert counting is not None
        counting.wait()
        # The one wait for the device: split sizes must be known on the host.
        counts_TSE = counts_RE.cpu()[self.members_TS]
        self.load.add(counts_TSE.sum((0, 1)), self.ep.size())
        mine_SE = counts_TSE[self.etp.rank()]
        first = self.ep.rank() * self.num_local_experts
        counts_TSL = counts_TSE[:, :, first : first + self.num_local_experts]
        exchange = Exchange(
            self.ep,
            output_split_sizes=counts_TSL[self.etp.rank()].sum(1).tolist(),
            input_split_sizes=mine_SE[self.ep.rank()].view(-1, self.num_local_experts).sum(1).tolist(),
        )
        return _AlltoAllDispatch(self, exchange.start(rows), row_map, probs_TK, counts_TSL, exchange)


@dataclass
class _AlltoAllDispatch:
    """row_map: order of this rank's own rows · counts_TSL: rows for each local expert from EP rank S of expert-TP rank
    T, on the host when anything is exchanged · exchange: what sends rows to the EP ranks (None: all experts are here).
    """

    dispatcher: MoEAlltoAllTokenDispatcher
    rows: Tensor
    row_map: Tensor
    probs_TK: Tensor
    counts_TSL: Tensor
    exchange: Exchange | None
    expert_map: Tensor | None = None
    back: Exchange | None = None

    def finish(self) -> tuple[Tensor, Tensor]:
        tokens_per_expert = self.counts_TSL.sum((0, 1))
        if self.exchange is None:
            return self.rows, tokens_per_expert
        rows = gather_rows(self.exchange.finish(self.rows), self.dispatcher.etp, self._etp_sizes())
        if self.counts_TSL.shape[-1] > 1:
            rows, self.expert_map = self.dispatcher.ops.token_permute(rows, self._local_experts(rows.device))
        return rows, tokens_per_expert

    def start_combine(self, rows: Tensor) -> None:
        if self.expert_map is not None:
            rows = self.dispatcher.ops.token_unpermute(rows, self.expert_map)
        if self.exchange is not None:
            rows = reduce_scatter_rows(rows, self.dispatcher.etp, self._etp_sizes())
            there = self.exchange
            self.back = Exchange(self.dispatcher.ep, there.input_split_sizes, there.output_split_sizes)
            rows = self.back.start(rows)
        self.rows = rows

    def finish_combine(self) -> Tensor:
        rows = self.rows if self.back is None else self.back.finish(self.rows)
        return self.dispatcher.ops.token_unpermute(rows, self.row_map, self.probs_TK)

    def _etp_sizes(self) -> list[int]:
        sizes: list[int] = self.counts_TSL.sum((1, 2)).tolist()
        return sizes

    def _local_experts(self, device: torch.device) -> Tensor:
        """Local expert of every row, [rows, 1]: rows come by expert-TP rank, source rank and, within it, by expert."""
        experts = torch.arange(self.counts_TSL.shape[-1]).expand(self.counts_TSL.shape).flatten()
        return async_h2d(experts.repeat_interleave(self.counts_TSL.flatten()).unsqueeze(1), device)


class MoEAllGatherTokenDispatcher:
    """Gather all tokens over ``groups.etp_ep``, take those of the local experts; add, weighted, and scatter the sums.

    It moves every token to every rank of the group: good for few ranks and many experts per token.
    """

    def __init__(self, num_experts: int, groups: ProcessGroups) -> None:
        self.group = groups.etp_ep
        self.num_local_experts = num_experts // groups.ep.size()
        self.first_expert = groups.ep.rank() * self.num_local_experts
        self.num_ranks = groups.ep.size()
        self.load = ExpertLoad()

    def start_dispatch(self, x_TH: Tensor, probs_TK: Tensor, indices_TK: Tensor, counts_E: Tensor) -> Dispatch:
        """Start the dispatch. Nothing overlaps with these collectives; ranks may hold different numbers of tokens."""
        num_tokens = torch.tensor([x_TH.shape[0]], device=x_TH.device)
        sizes = collectives.all_gather(num_tokens, self.group)[0].tolist()
        x_GH, probs_GK, indices_GK = (gather_rows(part, self.group, sizes) for part in (x_TH, probs_TK, indices_TK))
        if self.num_ranks > 1:
            num_experts = self.num_ranks * self.num_local_experts
            self.load.add(torch.bincount(indices_GK.flatten(), minlength=num_experts).cpu(), self.num_ranks)
        return _AllGatherDispatch(self, x_GH, probs_GK, indices_GK, sizes)


class _AllGatherDispatch:
    """The tokens G of the whole group, and which (token, choice) pairs have their expert here, by local expert."""

    def __init__(
        self,
        dispatcher: MoEAllGatherTokenDispatcher,
        x_GH: Tensor,
        probs_GK: Tensor,
        indices_GK: Tensor,
        sizes: list[int],
    ) -> None:
        self.group, self.sizes = dispatcher.group, sizes
        self.rows, self.probs_GK = x_GH, probs_GK
        local_GK = indices_GK - dispatcher.first_expert
        token, choice = ((local_GK >= 0) & (local_GK < dispatcher.num_local_experts)).nonzero(as_tuple=True)
        local = local_GK[token, choice]
        order = local.argsort(stable=True)
        self.token, self.choice = token[order], choice[order]
        self.tokens_per_expert = torch.bincount(local, minlength=dispatcher.num_local_experts)

    def finish(self) -> tuple[Tensor, Tensor]:
        return self.rows.index_select(0, self.token), self.tokens_per_expert

    def start_combine(self, rows: Tensor) -> None:
        """See ``Dispatch``; sums are float32 until they travel."""
        weighted = rows.float() * self.probs_GK[self.token, self.choice].unsqueeze(1)
        summed_GH = torch.zeros(self.rows.shape, dtype=weighted.dtype, device=rows.device)
        self.rows = summed_GH.index_add(0, self.token, weighted).to(rows.dtype)

    def finish_combine(self) -> Tensor:
        return reduce_scatter_rows(self.rows, self.group, self.sizes)


def make_token_dispatcher(
    kind: str, num_experts: int, hidden_size: int, groups: ProcessGroups, ops: TrainOps
) -> MoETokenDispatcher:
    """The dispatcher that ``moe_token_dispatcher_type`` names; all are one where all experts are here."""
    if kind == "allgather":
        return MoEAllGatherTokenDispatcher(num_experts, groups)
    if kind == "flex" and groups.etp_ep.size() > 1:
        return DeepEPTokenDispatcher(num_experts, hidden_size, groups)
    assert kind in ("alltoall", "flex"), kind
    return MoEAlltoAllTokenDispatcher(num_experts, groups, ops)


def _members_by_place(groups: ProcessGroups) -> Tensor:
    """Place in ``groups.etp_ep`` of expert-TP rank T and EP rank S, int64 [T, S], whatever the order of the ranks."""
    members_TS = torch.empty(groups.etp.size(), groups.ep.size(), dtype=torch.int64, device="cpu")
    for index, rank in enumerate(groups.layout.members(groups.rank, ("tp", "ep"), is_expert=True)):
        at = groups.layout.coords(rank)
        members_TS[at.etp, at.ep] = index
    return members_TS

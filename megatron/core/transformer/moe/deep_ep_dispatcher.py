"""The ``flex`` dispatcher: DeepEP's kernels (github.com/deepseek-ai/DeepEP, version 1) carry tokens and results.

A token travels once to each rank that has some of its experts, however many, and is weighted and added up there; DeepEP
adds the sums of the ranks. Limits: bfloat16 (the library's), experts that are not split over expert TP. Tolerance: that
of all-to-all in bfloat16; a token's experts are added rank by rank, in float32 on each.

Letters: T tokens of this rank, R tokens that arrive, n rows (a token for one of this rank's experts), H hidden, K
experts of a token, E experts, L experts of this rank.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.parallel_state import ProcessGroups
from megatron.core.transformer.moe.expert_load import ExpertLoad

_LEAST_BYTES = 2  # of a number that the library's buffer is sized for


class DeepEPTokenDispatcher:
    """See ``MoETokenDispatcher``. All layers of a group share one buffer; every rank of the group makes its first one.

    Raises:
        ValueError: deep_ep is not installed, or expert-TP ranks split the experts.
    """

    def __init__(self, num_experts: int, hidden_size: int, groups: ProcessGroups) -> None:
        if groups.etp.size() > 1:
            raise ValueError(
                f"moe_token_dispatcher_type 'flex' (DeepEP) with expert_tensor_parallel_size {groups.etp.size()}: its "
                "kernels send tokens to whole experts; set expert_tensor_parallel_size 1, or the type 'alltoall'"
            )
        self.ep, self.num_experts = groups.ep, num_experts
        self.buffer = _buffer(groups.ep, hidden_size * _LEAST_BYTES)
        self.load = ExpertLoad()

    def start_dispatch(self, x_TH: Tensor, probs_TK: Tensor, indices_TK: Tensor, counts_E: Tensor) -> _DeepEPDispatch:
        """Start: the library waits for the device to learn how many tokens arrive; their values come later."""
        counts_E = counts_E.clone()
        counting = dist.all_reduce(counts_E, group=self.ep, async_op=True)
        dispatch = _DeepEPDispatch(self, x_TH, probs_TK, indices_TK)
        assert counting is not None
        counting.wait()
        self.load.add(counts_E.cpu(), self.ep.size())
        return dispatch


class _DeepEPDispatch:
    """The tokens of one layer on their way."""

    def __init__(self, dispatcher: DeepEPTokenDispatcher, x_TH: Tensor, probs_TK: Tensor, indices_TK: Tensor) -> None:
        self.there = _Dispatching(dispatcher.buffer, indices_TK, dispatcher.num_experts)
        self.arriving = self.there.start(x_TH, probs_TK.float())

    def finish(self) -> tuple[Tensor, Tensor]:
        """See ``Dispatch``; the host knows the counts."""
        x_RH, probs_RK = self.there.finish(*self.arriving)
        self.num_received, self.arriving = len(x_RH), ()
        chosen, counts = self.there.chosen_RK.flatten(), self.there.counts
        # Choices of other ranks' experts are -1: sorted to the end, and cut off there.
        order_n = torch.where(chosen < 0, len(counts), chosen).argsort(stable=True)[: sum(counts)]
        self.token_n = order_n // probs_RK.shape[1]
        self.probs_n = probs_RK.flatten().index_select(0, order_n)
        return x_RH.index_select(0, self.token_n), torch.tensor(counts, dtype=torch.int64)

    def start_combine(self, rows: Tensor) -> None:
        """See ``Dispatch``; a token's rows are added in float32, weighted."""
        weighted = rows.float() * self.probs_n.unsqueeze(1)
        summed_RH = weighted.new_zeros(self.num_received, rows.shape[1]).index_add(0, self.token_n, weighted)
        self.back = _Combining(self.there.buffer, self.there.handle)
        self.arriving = self.back.start(summed_RH.to(rows.dtype))

    def finish_combine(self) -> Tensor:
        (y_TH,) = self.back.finish(*self.arriving)
        return y_TH


class _Transfer(ABC):
    """A transfer in two halves, whose gradients travel in two halves too, as in ``Exchange``.

    ``send`` and ``send_grads_back`` return what arrives, and the event after which it is there.
    """

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self._arriving: Sequence[Tensor] = ()
        self._event: Any = None

    @abstractmethod
    def send(self, *sent: Tensor) -> tuple[Sequence[Tensor], Any]: ...

    @abstractmethod
    def send_grads_back(self, *grads: Tensor) -> tuple[Sequence[Tensor], Any]: ...

    def start(self, *sent: Tensor) -> tuple[Tensor, ...]:
        """Send; the returned tensors may only be passed to ``finish``."""
        arriving: tuple[Tensor, ...] = _Start.apply(self, *sent)
        return arriving

    def finish(self, *arriving: Tensor) -> tuple[Tensor, ...]:
        received: tuple[Tensor, ...] = _Finish.apply(self, *arriving)
        return received

    def forth(self, sent: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self._arriving, self._event = self.send(*(x.contiguous() for x in sent))
        return tuple(x.view_as(x) for x in self._arriving)

    def back(self, grads: Sequence[Tensor]) -> None:
        self._arriving, self._event = self.send_grads_back(*(grad.contiguous() for grad in grads))

    def receive(self) -> tuple[Tensor, ...]:
        """Let the current stream wait for what was sent last."""
        self._event.current_stream_wait()
        arrived, self._arriving, self._event = tuple(self._arriving), (), None
        return arrived


class _Dispatching(_Transfer):
    """Tokens [T, H] and their probabilities [T, K] -> [R, H] and [R, K], and what ``send`` learns on the way.

    chosen_RK: each token's experts, counted from this rank's first, -1 for others · counts: rows of each expert here ·
    handle: the library's description of who sends what to whom.
    """

    handle: Any
    chosen_RK: Tensor
    counts: list[int]

    def __init__(self, buffer: Any, indices_TK: Tensor, num_experts: int) -> None:
        super().__init__(buffer)
        self.indices_TK, self.num_experts = indices_TK, num_experts

    def send(self, *sent: Tensor) -> tuple[Sequence[Tensor], Any]:
        x_TH, probs_TK = sent
        per_rank, per_node, per_expert, is_sent, _ = self.buffer.get_dispatch_layout(self.indices_TK, self.num_experts)
        x_RH, self.chosen_RK, probs_RK, self.counts, self.handle, event = self.buffer.dispatch(
            x_TH,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=is_sent,
            num_tokens_per_expert=per_expert,
            topk_idx=self.indices_TK,
            topk_weights=probs_TK,
            async_finish=True,
        )
        return (x_RH, probs_RK), event

    def send_grads_back(self, *grads: Tensor) -> tuple[Sequence[Tensor], Any]:
        grad_RH, grad_RK = grads
        *home, event = self.buffer.combine(grad_RH, self.handle, topk_weights=grad_RK, async_finish=True)
        return home, event


class _Combining(_Transfer):
    """Sums of tokens [R, H], which came by the dispatch with this ``handle`` -> [T, H]."""

    def __init__(self, buffer: Any, handle: Any) -> None:
        super().__init__(buffer)
        self.handle = handle

    def send(self, *sent: Tensor) -> tuple[Sequence[Tensor], Any]:
        y_TH, _, event = self.buffer.combine(*sent, self.handle, async_finish=True)
        return (y_TH,), event

    def send_grads_back(self, *grads: Tensor) -> tuple[Sequence[Tensor], Any]:
        grad_RH, *_, event = self.buffer.dispatch(*grads, handle=self.handle, async_finish=True)
        return (grad_RH,), event


class _Start(torch.autograd.Function):
    """Forward sends. Backward receives; the gradients that it is handed stand for those on their way."""

    @staticmethod
    def forward(ctx: Any, transfer: _Transfer, *sent: Tensor) -> tuple[Tensor, ...]:
        ctx.transfer = transfer
        return transfer.forth(sent)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.transfer.receive()


class _Finish(torch.autograd.Function):
    """Forward receives. Backward sends."""

    @staticmethod
    def forward(ctx: Any, transfer: _Transfer, *arriving: Tensor) -> tuple[Tensor, ...]:
        ctx.transfer = transfer
        return transfer.receive()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.transfer.back(grads)
        return None, *grads


@cache
def _buffer(group: dist.ProcessGroup, hidden_bytes: int) -> Any:
    """The library's buffer of a group, for the tokens and results of one layer at a time."""
    if importlib.util.find_spec("deep_ep") is None:
        raise ValueError(
            "moe_token_dispatcher_type 'flex' needs deep_ep, which is not installed: build DeepEP 1 "
            "(github.com/deepseek-ai/DeepEP) on every node, or set moe_token_dispatcher_type 'alltoall'"
        )
    from deep_ep import Buffer

    num_ranks = group.size()
    configs = Buffer.get_dispatch_config(num_ranks), Buffer.get_combine_config(num_ranks)
    nvlink_bytes = max(config.get_nvl_buffer_size_hint(hidden_bytes, num_ranks) for config in configs)
    rdma_bytes = max(config.get_rdma_buffer_size_hint(hidden_bytes, num_ranks) for config in configs)
    return Buffer(group, nvlink_bytes, rdma_bytes)

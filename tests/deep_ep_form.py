"""DeepEP's Python interface in plain torch over gloo, for machines without NVIDIA devices.

Names, arguments, shapes and meanings are those that DeepEP 1 documents of `deep_ep.Buffer` (its README, and docstrings
of deep_ep/buffer.py at github.com/deepseek-ai/DeepEP). float32 is taken beside bfloat16, so that results can be
compared closely. What an unfinished call returns holds nothing until its event has been waited for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@contextmanager
def deep_ep_installed() -> Iterator[None]:
    """Inside, `import deep_ep` imports this module."""
    sys.modules["deep_ep"] = sys.modules[__name__]
    try:
        yield
    finally:
        del sys.modules["deep_ep"]


class Config:
    """Sizes of a buffer."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class EventOverlap:
    """What a call's results wait for: `late` are (result, value)."""

    def __init__(self, late: list[tuple[Tensor, Tensor]]) -> None:
        self.late = late

    def current_stream_wait(self) -> None:
        for result, value in self.late:
            result.copy_(value)


def _arriving(is_async: bool, *values: Tensor) -> tuple[list[Tensor], EventOverlap]:
    if not is_async:
        return list(values), EventOverlap([])
    results = [torch.full_like(value, float("nan") if value.is_floating_point() else 1 << 20) for value in values]
    return results, EventOverlap(list(zip(results, values, strict=True)))


class Buffer:
    """In the normal mode `dispatch` sends a token once to each rank that has some of its experts; in the low-latency
    mode each expert gets it in a slot of its own.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
    ) -> None:
        assert group.size() in (2, 4, 8), "a default configuration exists for these sizes"
        assert num_rdma_bytes > 0 if low_latency_mode else num_nvl_bytes > 0
        self.low_latency_mode = low_latency_mode
        self.group, self.rank, self.group_size = group, group.rank(), group.size()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int, **_: Any) -> tuple[Any, ...]:
        """Tokens to each rank, None (one node), tokens to each expert, bool [tokens, ranks], event."""
        assert topk_idx.dtype is torch.int64 and topk_idx.is_contiguous()
        num_local = num_experts // self.group_size
        is_sent = torch.zeros(len(topk_idx), self.group_size, dtype=torch.bool)
        is_sent.scatter_(1, topk_idx // num_local, True)
        per_expert = torch.bincount(topk_idx.flatten(), minlength=num_experts).int()
        return is_sent.sum(0).int(), None, per_expert, is_sent, EventOverlap([])

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        async_finish: bool = False,
    ) -> tuple[Any, ...]:
        """(x, experts, weights, rows of each expert, handle, event); with a handle x alone travels, the same way."""
        assert x.is_contiguous() and x.dim() == 2
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            (received,), event = _arriving(async_finish, self._gathered(x, handle))
            return received, None, None, [], None, event
        assert topk_idx is not None and topk_weights is not None and is_token_in_rank is not None
        assert num_tokens_per_rank is not None and num_tokens_per_rdma_rank is None
        assert num_tokens_per_expert is not None and topk_weights.dtype is torch.float32
        handle = self._everyones(is_token_in_rank)
        num_local = len(num_tokens_per_expert) // self.group_size
        local = self._gathered(topk_idx, handle) - self.rank * num_local
        is_here = (local >= 0) & (local < num_local)
        local = local.masked_fill(~is_here, -1)
        weights = self._gathered(topk_weights, handle).masked_fill(~is_here, 0)
        counts = torch.bincount(local[is_here], minlength=num_local).tolist()
        (x, local, weights), event = _arriving(async_finish, self._gathered(x, handle), local, weights)
        return x, local, weights, counts, handle, event

    def combine(
        self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, async_finish: bool = False
    ) -> tuple[Any, ...]:
        """(x, weights, event): sums over the ranks that got the token, without weights."""
        assert x.is_contiguous()
        summed = self._summed(x, handle)
        if topk_weights is None:
            (summed,), event = _arriving(async_finish, summed)
            return summed, None, event
        (summed, weights), event = _arriving(async_finish, summed, self._summed(topk_weights, handle))
        return summed, weights, event

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        return 2 * num_max_dispatch_tokens_per_rank * hidden * num_experts

    def low_latency_dispatch(
        self, x: Tensor, topk_idx: Tensor, num_max_dispatch_tokens_per_rank: int, num_experts: int, use_fp8: bool = True
    ) -> tuple[Any, ...]:
        """([experts here, tokens of all ranks at most, hidden], int32 [experts here], handle, event, hook). -1 chooses
        nothing; slots past an expert's number hold anything.
        """
        assert self.low_latency_mode and not use_fp8 and x.dtype is torch.bfloat16 and topk_idx.dtype is torch.int64
        assert len(x) <= num_max_dispatch_tokens_per_rank and x.is_contiguous()
        num_here = num_experts // self.group_size
        slots = num_max_dispatch_tokens_per_rank * self.group_size
        received = torch.full((num_here, slots, x.shape[1]), float("nan"), dtype=x.dtype)
        counts, sources = torch.zeros(num_here, dtype=torch.int32), []
        everyones = zip(self._everyones(x), self._everyones(topk_idx), strict=True)
        for rank, (rows, choices) in enumerate(everyones):
            for token, choice in (choices // num_here == self.rank).nonzero().tolist():
                expert = int(choices[token, choice]) % num_here
                slot = int(counts[expert])
                received[expert, slot] = rows[token]
                sources.append((expert, slot, rank, token, choice))
                counts[expert] += 1
        return received, counts, sources, EventOverlap([]), None

    def low_latency_combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: list[tuple[int, ...]]
    ) -> tuple[Any, ...]:
        """([tokens, hidden], event, hook): each token's results, weighted and added."""
        assert x.dtype is torch.bfloat16 and x.is_contiguous() and topk_weights.dtype is torch.float32
        total = torch.zeros(len(topk_idx), x.shape[2])
        parts: list[Any] = [None] * self.group_size
        dist.all_gather_object(parts, (x, handle), group=self.group)
        for rows, sources in parts:
            for expert, slot, rank, token, choice in sources:
                if rank == self.rank:
                    total[token] += topk_weights[token, choice] * rows[expert, slot].float()
        return total.to(x.dtype), EventOverlap([]), None

    def _everyones(self, x: Tensor) -> list[Tensor]:
        parts: list[Any] = [None] * self.group_size
        dist.all_gather_object(parts, x.detach(), group=self.group)
        return parts

    def _gathered(self, x: Tensor, handle: list[Tensor]) -> Tensor:
        """The rows of all ranks that are sent here."""
        parts = zip(self._everyones(x), handle, strict=True)
        return torch.cat([part[is_sent[:, self.rank]] for part, is_sent in parts])

    def _summed(self, x: Tensor, handle: list[Tensor]) -> Tensor:
        is_sent = handle[self.rank]
        total = torch.zeros(len(is_sent), x.shape[1])
        for rank, rows in enumerate(self._everyones(x)):
            first = sum(int(other[:, rank].sum()) for other in handle[: self.rank])
            total[is_sent[:, rank]] += rows[first : first + int(is_sent[:, rank].sum())].float()
        return total.to(x.dtype)


class ShapesOnly(Buffer):
    """For tensors on meta, in the low-latency mode: what arrives has a shape and no values."""

    def low_latency_dispatch(
        self, x: Tensor, topk_idx: Tensor, num_max_dispatch_tokens_per_rank: int, num_experts: int, use_fp8: bool = True
    ) -> tuple[Any, ...]:
        assert topk_idx.device == x.device and len(x) <= num_max_dispatch_tokens_per_rank
        num_here, slots = num_experts // self.group_size, num_max_dispatch_tokens_per_rank * self.group_size
        counts = x.new_empty(num_here, dtype=torch.int32)
        return x.new_empty(num_here, slots, x.shape[1]), counts, None, EventOverlap([]), None

    def low_latency_combine(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: Any) -> tuple[Any, ...]:
        return x.new_empty(len(topk_idx), x.shape[2]), EventOverlap([]), None

"""Op tables of planned rollout: the run's own where they are torch or our kernels, shapes where they are a vendor's.

The planner decides what a program's course depends on: the experts that tokens choose, and the sampled tokens.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_formats.config import HFModelConfig
from tools.plan.collectives import Collective, CollectiveLog
from tools.plan.launches import launched
from tools.plan.ops import Routing
from tools.plan.rollout_npu import kernel_exchanged_experts, npu_ops
from verl.workers.config import RolloutConfig
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.ops import reference
from vllm.ops.contract import (
    Choices,
    ExpertMatrices,
    FusedExperts,
    KVCache,
    RolloutOps,
    RouterSettings,
    SampledTokens,
    SamplingBatch,
)
from vllm.ops.cpu.build import kernels_problem
from vllm.ops.cpu.table import best_products, cpu_table
from vllm.ops.cuda.exchange import is_gathered
from vllm.ops.cuda.table import cuda_table
from vllm.ops.reference_moe import all_to_all_experts
from vllm_ascend.ops.exchanged_experts import is_one_call


@dataclass(frozen=True)
class Spread:
    """How the tokens of a step spread over the experts of one engine, whose ranks share them.

    load: as in `Routing`; 1 sends every token to the experts after those of the token before, over all ranks, which is
    also what ``fix_router`` does · index: this rank's among those ranks · tp: ranks of a replica, which share its
    tokens when they are dispatched · is_dispatched: whether each rank routes tokens of its own.
    """

    load: float
    index: int
    num_ranks: int
    num_experts: int
    tp: int
    is_dispatched: bool

    def chosen(self, num_tokens: int, topk: int, num_experts: int, index: int | None = None) -> Tensor:
        """int64 [T, K] on the host: the choices of the rank with this index; of this rank without one."""
        if self.load != 1.0:
            num_here = self.num_experts // self.num_ranks
            routing = Routing(self.load, self.index * num_here, num_here, self.num_ranks)
            return routing.chosen(num_tokens, topk, num_experts)
        index = self.index if index is None else index
        first = index * num_tokens * topk if self.is_dispatched else 0
        return ((first + torch.arange(num_tokens * topk)) % num_experts).view(num_tokens, topk)

    def exchanged(
        self, num_rows: int, step_tokens: int, topk: int, start: int, stop: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Choices that this rank sends to each rank, and gets of each, of the rows [start, stop) of everyone's
        `num_rows`, when every replica has `step_tokens` tokens.
        """
        num_here = self.num_experts // self.num_ranks

        def ranks_chosen(index: int) -> Tensor:
            num_active = min(max(step_tokens - index % self.tp * num_rows, 0), num_rows)
            return self.chosen(num_rows, topk, self.num_experts, index)[start : min(stop, num_active)] // num_here

        sent = torch.bincount(ranks_chosen(self.index).flatten(), minlength=self.num_ranks)
        received = [int((ranks_chosen(index) == self.index).sum()) for index in range(self.num_ranks)]
        return tuple(sent.tolist()), tuple(received)


def rollout_spread(config: RolloutConfig, hf: HFModelConfig, rank: int, num_ranks: int, load: float) -> Spread:
    """The spread on a rank of an engine, or of one of several engines, on `num_ranks` ranks."""
    tp = config.tensor_model_parallel_size
    span = config.experts_over(num_ranks) if config.enable_expert_parallel else 1
    return Spread(load, rank % span, span, hf.n_routed_experts, tp, config.expert_exchange == "dispatch" and span > 1)


def ordinary_token(hf: HFModelConfig) -> int:
    """The first token that is not an end-of-sequence token."""
    return next(token for token in itertools.count() if token not in hf.eos_token_ids)


def rollout_ops(kind: str, spread: Spread, token: int, log: CollectiveLog) -> RolloutOps:
    """The table that a run uses on a device of `kind` (cpu, cuda or npu).

    Args:
        token: that every row samples.
        log: gets the collectives that are kernels and not torch's.
    """
    if kind == "npu":
        table = npu_ops()
    elif (
        kind == "cpu" and kernels_problem() is None
    ):  # nothing is launched: the kernels would read addresses that are not mapped
        table = cpu_table(best_products(), launch=lambda name, *arguments: None)
    elif kind == "cuda":
        table = cuda_table(launch=lambda name, grid, *arguments, **options: launched())
    else:
        table = reference.rollout_ops()
    given = _Given(kind, table, spread, token, log)
    names = ("norm_rope_write_kv", "rope_write_gqa", "topk_router", "fused_experts", "exchanged_experts", "sample")
    return replace(table, **{name: getattr(given, name) for name in names})


@dataclass
class _Given:
    """The table's entries whose results depend on given routing, sampling or group sizes."""

    kind: str
    table: RolloutOps
    spread: Spread
    token: int
    log: CollectiveLog
    step_tokens: int = field(default=0, init=False)  # of this replica in the step that runs

    def __post_init__(self) -> None:
        # The caches belong to the rank: tensors in a cache of the process would count in its first rank only.
        self._chosen = lru_cache(maxsize=8)(self.spread.chosen)
        self._exchanged = lru_cache(maxsize=256)(self.spread.exchanged)

    def norm_rope_write_kv(self, cache: KVCache, kv_TD: Tensor, *others: Any) -> None:
        self.step_tokens = len(kv_TD)
        self.table.norm_rope_write_kv(cache, kv_TD, *others)

    def rope_write_gqa(self, cache: KVCache, qkv_TMD: Tensor, *others: Any) -> Tensor:
        self.step_tokens = len(qkv_TMD)
        return self.table.rope_write_gqa(cache, qkv_TMD, *others)

    def topk_router(self, logits_TE: Tensor, bias_E: Tensor | None, routing: RouterSettings) -> Choices:
        weights_TK, _ = self.table.topk_router(logits_TE, bias_E, routing)
        return weights_TK, self._chosen(logits_TE.shape[0], routing.top_k, logits_TE.shape[1]).clone()

    def fused_experts(self, x_TH: Tensor, matrices: ExpertMatrices, choices: Choices, first_expert: int) -> Tensor:
        _, ids_TK = choices
        if self.table.implementations["fused_experts"] != "reference":
            return self.table.fused_experts(x_TH, matrices, choices, first_expert)
        is_here = (ids_TK >= first_expert) & (ids_TK < first_expert + len(matrices[0]))
        return _sorted_experts(x_TH, matrices, ids_TK, int(is_here.sum()))

    def exchanged_experts(
        self, x_TH: Tensor, matrices: ExpertMatrices, choices: Choices, num_active: int, group: GroupCoordinator
    ) -> Tensor:
        _, ids_TK = choices
        num_rows, top_k = ids_TK.shape
        if self.kind == "npu" and is_one_call(x_TH, top_k, len(matrices[0]), group.world_size):
            note = partial(self._note, x_TH, top_k, group)
            return kernel_exchanged_experts(x_TH, matrices, choices, group.world_size, note)
        if self.kind == "cuda" and is_gathered(num_rows, group.world_size):
            return self.table.exchanged_experts(x_TH, matrices, choices, num_active, group)
        _, received = self._exchanged(num_rows, self.step_tokens, top_k, 0, num_rows)
        known = _KnownCounts(group.rank_in_group, group.world_size, group.group, received=received)
        experts = self._experts_of_all()
        return all_to_all_experts(x_TH, matrices, choices, num_active, known, experts)

    def sample(self, logits_BW: Tensor, batch: SamplingBatch) -> SampledTokens:
        sampled = self.table.sample(logits_BW, batch)
        return replace(sampled, token_ids_B=torch.full((len(logits_BW),), self.token))

    def _experts_of_all(self) -> FusedExperts:
        """The kernel for rows that were all sent to an expert of this rank."""
        if self.table.implementations["fused_experts"] != "reference":
            return self.table.fused_experts
        return lambda x, matrices, choices, first: _sorted_experts(x, matrices, choices[1], len(x))

    def _note(self, x_TH: Tensor, top_k: int, group: GroupCoordinator, kernel: str) -> None:
        """Log the collective that is in the kernel, dispatch or combine."""
        assert group.group is not None, "a group of one rank has nothing to exchange"
        there, back = self._exchanged(len(x_TH), self.step_tokens, top_k, 0, len(x_TH))
        sent, received = (there, back) if kernel == "dispatch" else (back, there)
        sizes = (sum(sent) * x_TH.shape[1], sum(received) * x_TH.shape[1])
        ranks, dtype = tuple(dist.get_process_group_ranks(group.group)), str(x_TH.dtype).removeprefix("torch.")
        self.log.note(Collective("all_to_all", kernel, ranks, dtype, *sizes, (sent, received), -1))


@dataclass(frozen=True)
class _KnownCounts(GroupCoordinator):
    """A group whose ranks send counts that are known beforehand: in a plan nobody sends them."""

    received: tuple[int, ...] = ()

    def all_to_all(
        self, x: Tensor, sent_counts: list[int] | None = None, received_counts: list[int] | None = None
    ) -> Tensor:
        arrived = super().all_to_all(x, sent_counts, received_counts)
        return torch.tensor(self.received) if sent_counts is None else arrived


def _sorted_experts(x_TH: Tensor, matrices: ExpertMatrices, ids_TK: Tensor, num_here: int) -> Tensor:
    """What the reference's `fused_experts` allocates for `num_here` choices of this rank's experts."""
    out_TH = torch.zeros_like(x_TH)
    order_S = torch.empty(ids_TK.numel(), dtype=torch.int64, device=x_TH.device)
    if num_here == 0:
        return out_TH
    x_SH = x_TH.new_empty(num_here, x_TH.shape[1])
    gate_up_S2F = x_SH.new_empty(num_here, matrices[0].shape[1])
    y_SH = torch.empty_like(x_SH)
    reference.silu_and_mul(gate_up_S2F)
    del order_S, y_SH
    return out_TH

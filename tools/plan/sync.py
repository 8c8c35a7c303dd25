"""The weight sync from training to rollout, by the transfer plan of the run itself."""

from __future__ import annotations

import gc
from collections.abc import Callable, ItemsView, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import lcm
from typing import TypeAlias, TypeVar

import torch

from hf_formats.config import HFModelConfig
from megatron.core.parallel_layout import ParallelLayout
from tools.plan.collectives import Collective
from verl.workers.megatron_workers import ActorRolloutRefWorker
from verl.workers.sharding_manager.transfer import WeightTransfer
from verl.workers.sharding_manager.transfer_plan import Route, TransferPlan, build_plan
from vllm.config import ParallelConfig, VllmConfig
from vllm.model_executor.model_loader.held_slices import HeldSlice, held_slices
from vllm.transformers_utils.config import HFConfig

Item = TypeVar("Item")


@dataclass(frozen=True)
class SyncPlan:
    """One rank's part in a weight sync.

    sent_bytes, received_bytes: what goes over the network · kept_bytes: what goes from its training weights to its
    rollout weights without a buffer · num_rounds: the number of all-to-alls, the same on all ranks · peak_bucket_bytes:
    all buffers that are alive together · calls: the all-to-alls and the comparison of correct digests.
    """

    sent_bytes: int
    received_bytes: int
    kept_bytes: int
    num_rounds: int
    peak_bucket_bytes: int
    calls: tuple[Collective, ...]


def plan_weight_sync(worker: ActorRolloutRefWorker) -> SyncPlan:
    """The weight sync of a worker that is built; nothing is moved."""
    sync = worker.sharding_manager.sync
    rounds, group = sync.transfer.rounds, sync.group
    ranks = tuple(torch.distributed.get_process_group_ranks(group))
    calls = [
        Collective(
            "all_to_all",
            "world",
            ranks,
            "uint8",
            sum(round_.sent_bytes),
            sum(round_.received_bytes),
            (tuple(round_.sent_bytes), tuple(round_.received_bytes)),
            -1,
        )
        for round_ in rounds
    ]
    calls.append(Collective("all_reduce", "world", ranks, "int64", 2, 2, None, -1))  # of the digests
    return SyncPlan(
        sent_bytes=sum(sum(round_.sent_bytes) for round_ in rounds),
        received_bytes=sum(sum(round_.received_bytes) for round_ in rounds),
        kept_bytes=sum(route.num_bytes for round_ in rounds for route in round_.kept),
        num_rounds=len(rounds),
        peak_bucket_bytes=sync.transfer.peak_bytes,
        calls=tuple(calls),
    )


def move_largest_only(transfer: WeightTransfer) -> None:
    """Let every later round move only its largest part of each dtype through its buffers, whose sizes stay.

    The memory of a sync is that of the buffers and of one part at a time, so the other parts change nothing.
    """
    transfer.rounds = [
        replace(
            round_,
            kept=_largest(round_.kept, lambda route: route),
            sent=_largest(round_.sent, lambda parcel: parcel.route),
            received=_largest(round_.received, lambda parcel: parcel.route),
        )
        for round_ in transfer.rounds
    ]


def _largest(items: tuple[Item, ...], route_of: Callable[[Item], Route]) -> tuple[Item, ...]:
    found: dict[torch.dtype, Item] = {}
    for item in items:
        route = route_of(item)
        if route.dtype not in found or route.num_bytes > route_of(found[route.dtype]).num_bytes:
            found[route.dtype] = item
    return tuple(found.values())


def shared_plan(
    hf: HFModelConfig,
    layout: ParallelLayout,
    params_dtype: torch.dtype,
    holdings: Mapping[int, Mapping[str, HeldSlice]],
    num_ranks: int,
    *,
    bucket_bytes: int,
    ranks_per_node: int,
) -> TransferPlan:
    """`build_plan`, called once for all ranks that this process plans: the plan is the same on all of them, and it
    takes longer than everything else of a rank.
    """
    ends = tuple(_slices_of(holdings[rank]) for rank in (min(holdings), max(holdings)))
    return _built(_PlanRequest(hf, layout, params_dtype, num_ranks, bucket_bytes, ranks_per_node, ends, holdings))


@dataclass(frozen=True)
class _PlanRequest:
    """Arguments of `build_plan`. The first and the last of an engine's ranks determine the layout of all."""

    hf: HFModelConfig
    layout: ParallelLayout
    params_dtype: torch.dtype
    num_ranks: int
    bucket_bytes: int
    ranks_per_node: int
    ends: tuple[SlicesOf, ...]
    holdings: Mapping[int, Mapping[str, HeldSlice]] = field(compare=False)


def _slices_of(held: Mapping[str, HeldSlice]) -> SlicesOf:
    assert isinstance(held, RankSlices), type(held)
    return held.of


@lru_cache(maxsize=1)
def _built(request: _PlanRequest) -> TransferPlan:
    gc.disable()  # it would traverse millions of new objects again and again, and none of them are in a cycle
    try:
        plan = build_plan(
            request.hf,
            request.layout,
            request.params_dtype,
            request.holdings,
            request.num_ranks,
            bucket_bytes=request.bucket_bytes,
            ranks_per_node=request.ranks_per_node,
        )
    finally:
        gc.enable()
    _slices.cache_clear()  # large where experts are cut over ranks: each rank then holds a part of every expert
    return plan


SlicesOf: TypeAlias = tuple[HFConfig, ParallelConfig, torch.dtype, str | None]  # arguments of `held_slices`


class RankSlices(Mapping[str, HeldSlice]):
    """What a rank of an engine holds, computed on first access: only `build_plan` needs it of every rank."""

    def __init__(self, of: SlicesOf) -> None:
        self.of = of

    def __getitem__(self, name: str) -> HeldSlice:
        return _slices(*self.of)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_slices(*self.of))

    def __len__(self) -> int:
        return len(_slices(*self.of))

    def items(self) -> ItemsView[str, HeldSlice]:
        """All at once, which is quicker than one by one."""
        return _slices(*self.of).items()


def rank_slices(config: VllmConfig, rank: int) -> RankSlices:
    """What rank ``rank`` of an engine holds; one object for all ranks that hold the same."""
    parallel, model = config.parallel, config.model
    period = lcm(parallel.tensor_parallel_size, parallel.expert_parallel_size)
    dtype: torch.dtype = getattr(torch, model.dtype)
    return _shared((model.hf, replace(parallel, rank=rank % period), dtype, model.quantization))


_shared = lru_cache(maxsize=1024)(RankSlices)
_slices = lru_cache(maxsize=256)(held_slices)

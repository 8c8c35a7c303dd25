"""The weight sync from training to rollout, by the transfer plan of the run itself."""

from __future__ import annotations

import gc
from collections.abc import Callable, ItemsView, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import lcm
from operator import itemgetter
from typing import TypeAlias, TypeVar

import torch

from hf_formats.config import HFModelConfig
from megatron.core.parallel_layout import ParallelLayout
from tools.plan.collectives import Collective
from verl.workers.megatron_workers import ActorRolloutRefWorker
from verl.workers.sharding_manager.transfer_plan import Transfer, TransferPlan, build_plan
from verl.workers.sharding_manager.weight_transfer import WeightTransfer
from vllm.config import ParallelConfig, VllmConfig
from vllm.model_executor.model_loader.rank_shards import RankShards, rank_shards
from vllm.model_executor.model_loader.shard import Shard
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
        kept_bytes=sum(transfer.num_bytes for round_ in rounds for transfer in round_.local),
        num_rounds=len(rounds),
        peak_bucket_bytes=sync.transfer.peak_bytes,
        calls=tuple(calls),
    )


def move_largest_only(transfer: WeightTransfer) -> None:
    """Let every later round move only its largest transfer of each dtype through its buffers, whose sizes stay.

    The memory of a sync is that of the buffers and of one transfer at a time, so the others change nothing.
    """
    transfer.rounds = [
        replace(
            round_,
            local=_largest(round_.local, lambda transfer: transfer),
            sent=_largest(round_.sent, itemgetter(0)),
            received=_largest(round_.received, itemgetter(0)),
        )
        for round_ in transfer.rounds
    ]


def _largest(items: tuple[Item, ...], transfer_of: Callable[[Item], Transfer]) -> tuple[Item, ...]:
    found: dict[torch.dtype, Item] = {}
    for item in items:
        transfer = transfer_of(item)
        if transfer.dtype not in found or transfer.num_bytes > transfer_of(found[transfer.dtype]).num_bytes:
            found[transfer.dtype] = item
    return tuple(found.values())


def shared_plan(
    hf: HFModelConfig,
    layout: ParallelLayout,
    params_dtype: torch.dtype,
    rollout_shards: Mapping[int, RankShards],
    num_ranks: int,
    *,
    bucket_bytes: int,
    ranks_per_node: int,
) -> TransferPlan:
    """`build_plan`, called once for all ranks that this process plans: the plan is the same on all of them, and it
    takes longer than everything else of a rank.
    """
    ends = tuple(_shards_key(rollout_shards[rank]) for rank in (min(rollout_shards), max(rollout_shards)))
    return _built(_PlanRequest(hf, layout, params_dtype, num_ranks, bucket_bytes, ranks_per_node, ends, rollout_shards))


@dataclass(frozen=True)
class _PlanRequest:
    """Arguments of `build_plan`. The first and the last of an engine's ranks determine the shards of all."""

    hf: HFModelConfig
    layout: ParallelLayout
    params_dtype: torch.dtype
    num_ranks: int
    bucket_bytes: int
    ranks_per_node: int
    ends: tuple[ShardsKey, ...]
    rollout_shards: Mapping[int, RankShards] = field(compare=False)


def _shards_key(shards: RankShards) -> ShardsKey:
    assert isinstance(shards, LazyShards), type(shards)
    return shards.key


@lru_cache(maxsize=1)
def _built(request: _PlanRequest) -> TransferPlan:
    gc.disable()  # it would traverse millions of new objects again and again, and none of them are in a cycle
    try:
        plan = build_plan(
            request.hf,
            request.layout,
            request.params_dtype,
            request.rollout_shards,
            request.num_ranks,
            bucket_bytes=request.bucket_bytes,
            ranks_per_node=request.ranks_per_node,
        )
    finally:
        gc.enable()
    _shards.cache_clear()  # large where experts are cut over ranks: each rank then owns a part of every expert
    return plan


ShardsKey: TypeAlias = tuple[HFConfig, ParallelConfig, torch.dtype, str | None]  # arguments of `rank_shards`


class LazyShards(Mapping[str, Shard]):
    """The shards of a rank of an engine, computed on first use: only a transfer plan needs those of all ranks."""

    def __init__(self, key: ShardsKey) -> None:
        self.key = key

    def __getitem__(self, name: str) -> Shard:
        return _shards(*self.key)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_shards(*self.key))

    def __len__(self) -> int:
        return len(_shards(*self.key))

    def items(self) -> ItemsView[str, Shard]:
        """Faster than one by one."""
        return _shards(*self.key).items()


def lazy_shards(config: VllmConfig, rank: int) -> LazyShards:
    """The shards of rank ``rank`` of an engine; one object for all ranks that own the same."""
    parallel, model = config.parallel, config.model
    period = lcm(parallel.tensor_parallel_size, parallel.expert_parallel_size)
    dtype: torch.dtype = getattr(torch, model.dtype)
    return _shared((model.hf, replace(parallel, rank=rank % period), dtype, model.quantization))


_shared = lru_cache(maxsize=1024)(LazyShards)
_shards = lru_cache(maxsize=256)(rank_shards)

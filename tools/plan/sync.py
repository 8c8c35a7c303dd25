"""The weight sync from training to rollout, by the transfer plan of the run itself."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, ItemsView, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from math import lcm
from operator import itemgetter
from typing import TypeAlias, TypeVar, cast

import torch

from hf_formats.config import HFModelConfig
from megatron.core.parallel_layout import ParallelLayout
from tools.plan.collectives import Collective
from verl.workers.weight_sync.plan import Transfer, TransferPlan, build_plan
from verl.workers.weight_sync.sync import WeightSync
from vllm.config import ParallelConfig, VllmConfig
from vllm.model_executor.model_loader.rank_shards import RankShards, rank_shards
from vllm.model_executor.model_loader.weight_view import WeightView
from vllm.transformers_utils.config import HFConfig

Item = TypeVar("Item")
_built: dict[Hashable, TransferPlan] = {}  # the last plan, by the arguments of `shared_plan`


def planned_sync(sync: WeightSync) -> tuple[dict[str, int], tuple[Collective, ...]]:
    """A rank's weight sync without moving anything: its bytes and its calls.

    Bytes: ``sent`` and ``received`` go over the network, ``kept`` go from the rank's training weights to its rollout
    weights without a buffer, and ``buckets`` are all buffers that are alive together. Calls: an all-to-all each round
    and the comparison of correct digests.
    """
    rounds, ranks = sync.rounds, tuple(torch.distributed.get_process_group_ranks(sync.group))
    calls = []
    for round_ in rounds:
        sent, received = tuple(round_.sent_bytes), tuple(round_.received_bytes)
        sizes = (sum(sent), sum(received))
        calls.append(Collective("all_to_all", "world", ranks, "uint8", *sizes, (sent, received), -1))
    num_bytes = {
        "sent": sum(call.sent for call in calls),
        "received": sum(call.received for call in calls),
        "kept": sum(transfer.num_bytes for round_ in rounds for transfer in round_.local),
        "buckets": sync.peak_bytes,
    }
    digests = Collective("all_reduce", "world", ranks, "int32", 8, 8, None, -1)
    return num_bytes, (*calls, digests)


def move_largest_only(sync: WeightSync) -> None:
    """Let every later round move only its largest transfer of each dtype through its buffers, whose sizes stay.

    The memory of a sync is that of the buffers and of one transfer at a time, so the others change nothing.
    """
    sync.rounds = [
        replace(
            round_,
            local=_largest(round_.local, lambda transfer: transfer),
            sent=_largest(round_.sent, itemgetter(0)),
            received=_largest(round_.received, itemgetter(0)),
        )
        for round_ in sync.rounds
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
    # The first and the last of an engine's ranks determine the shards of all.
    ends = tuple(cast(LazyShards, rollout_shards[rank]).key for rank in (min(rollout_shards), max(rollout_shards)))
    key = (hf, layout, params_dtype, ends, num_ranks, bucket_bytes, ranks_per_node)
    if key not in _built:
        gc.disable()  # it would traverse millions of new objects again and again, and none of them are in a cycle
        try:
            sizes = {"bucket_bytes": bucket_bytes, "ranks_per_node": ranks_per_node}
            plan = build_plan(hf, layout, params_dtype, rollout_shards, num_ranks, **sizes)
        finally:
            gc.enable()
        _shards.cache_clear()  # large where experts are cut over ranks: each rank then owns a part of every expert
        _built.clear()
        _built[key] = plan
    return _built[key]


ShardsKey: TypeAlias = tuple[HFConfig, ParallelConfig, torch.dtype, str | None]  # arguments of `rank_shards`


class LazyShards(Mapping[str, WeightView]):
    """The shards of a rank of an engine, computed on first use: only a transfer plan needs those of all ranks."""

    def __init__(self, key: ShardsKey) -> None:
        self.key = key

    def __getitem__(self, name: str) -> WeightView:
        return _shards(*self.key)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_shards(*self.key))

    def __len__(self) -> int:
        return len(_shards(*self.key))

    def items(self) -> ItemsView[str, WeightView]:
        """The items, faster than one by one."""
        return _shards(*self.key).items()


def lazy_shards(config: VllmConfig, rank: int) -> LazyShards:
    """The shards of rank ``rank`` of an engine; one object for all that own the same, however they exchange tokens."""
    parallel, model = replace(config.parallel, expert_exchange="all_gather"), config.model
    period = lcm(parallel.tensor_parallel_size, parallel.expert_parallel_size)
    dtype: torch.dtype = getattr(torch, model.dtype)
    return _shared((model.hf, replace(parallel, rank=rank % period), dtype, model.quantization))


_shared = lru_cache(maxsize=1024)(LazyShards)
_shards = lru_cache(maxsize=256)(rank_shards)

"""The plan of a weight sync, a pure function: which rank sends which elements of which weight to whom, in which round.

It joins the shards of the training ranks with those of the rollout ranks. Every rank computes the same plan by itself.
A rollout rank gets each element that it owns once: from itself where it trains the element too, else from a source rank
on its own node where there is one; the source ranks of a shard take turns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from hf_formats.config import HFModelConfig
from hf_formats.fp8 import BLOCK, FP8_DTYPE, SCALE_SUFFIX, num_blocks
from hf_formats.problems import raise_problems
from hf_formats.ranges import Ranges, intersection, shape_of
from megatron.core.parallel_layout import ParallelLayout
from mindspeed_llm.hf_shapes import always_fp32
from mindspeed_llm.weight_plan import Shard, model_shards, owner_ranks
from verl.workers.weight_sync.rounds import RankPairs, RoundAssigner, SourceSelector
from vllm.model_executor.model_loader.rank_shards import RankShards

ALIGNMENT = 8  # bytes, of every part of a message
_PARTS_OF_A_ROUND = 4  # transfers are cut so that a round has room for so many of one sender


class Transfer(NamedTuple):
    """hf_tensor[ranges], sent in `dtype` in round `round`. A tuple, because there may be millions."""

    rollout_shard: int  # number of the shard that it is a part of, see TransferPlan.shard_number
    hf_name: str
    ranges: Ranges
    shard: Shard  # of the training ranks
    dtype: torch.dtype
    pairs: RankPairs
    digest_rank: int  # the source that computes its part of the expected digest
    num_bytes: int  # of one copy
    round: int


@dataclass(frozen=True)
class TransferPlan:
    """All transfers of a sync in the order in which they are packed, and the distinct shards of the rollout ranks.

    quantised: every training shard of the weights that rollout ranks store in FP8, with its source ranks.
    first_shards, shard_tables: the number of each tensor's first distinct shard, and by the ranges of its shards what
        is added to it; tensors that are cut alike share a table.
    """

    transfers: tuple[Transfer, ...]
    quantised: tuple[tuple[Shard, tuple[int, ...]], ...]
    first_shards: Mapping[str, int]
    shard_tables: Mapping[str, Mapping[Ranges, int]]
    num_destinations_N: np.ndarray  # int64 [shards of the rollout ranks], ranks that own each
    tensors: RankShards  # a shard of each, for its shape and its dtype in the rollout engines
    num_rounds: int
    num_ranks: int

    def shard_number(self, hf_name: str, ranges: Ranges) -> int:
        """The number of a rollout shard among the distinct ones."""
        return self.first_shards[hf_name] + self.shard_tables[hf_name][ranges]

    @cached_property
    def rank_pairs(self) -> dict[int, RankPairs]:
        """The distinct pairs, which many transfers share, by their ids."""
        return {id(transfer.pairs): transfer.pairs for transfer in self.transfers}

    def traffic(self) -> Traffic:
        sent, received, held, expert_received, expert_held = np.zeros((5, self.num_ranks), dtype=np.int64)
        for transfer in self.transfers:
            pairs = transfer.pairs
            sent[pairs.senders_S] += pairs.copies_S * transfer.num_bytes
            received[pairs.receivers_R] += transfer.num_bytes
            size = transfer.num_bytes // transfer.dtype.itemsize * self.tensors[transfer.hf_name].dtype.itemsize
            held[pairs.destinations_D] += size
            if transfer.shard.is_expert:
                expert_received[pairs.receivers_R] += transfer.num_bytes
                expert_held[pairs.destinations_D] += size
        return Traffic(sent, received, held, expert_received, expert_held)


@dataclass(frozen=True)
class Traffic:
    """Bytes [num_ranks] that go over the network, and that rollout ranks hold in the end."""

    sent: np.ndarray
    received: np.ndarray
    held: np.ndarray
    expert_received: np.ndarray
    expert_held: np.ndarray


def build_plan(
    hf: HFModelConfig,
    layout: ParallelLayout,
    params_dtype: torch.dtype,
    rollout_shards: Mapping[int, RankShards],
    num_ranks: int,
    *,
    bucket_bytes: int,
    ranks_per_node: int,
) -> TransferPlan:
    """The plan of a group of `num_ranks` ranks, of which the first `layout.world_size` train.

    Args:
        rollout_shards: rank in the group -> `rank_shards` of the rollout engine there.
        bucket_bytes: what a rank may send and receive in one round together.
    """
    destinations = _destinations(rollout_shards)
    trained, joins = model_shards(hf, layout), _Joins()
    problems: list[str] = []
    first_shards, shard_tables, num_destinations_N = _numbered(destinations)
    tensors = {name: shard for shards in _distinct(rollout_shards).values() for name, shard in shards.items()}
    selector, cuts = SourceSelector(ranks_per_node), _Cuts(bucket_bytes // 2)
    transfers: list[Transfer] = []
    quantised: list[tuple[Shard, tuple[int, ...]]] = []
    owners_of: dict[tuple[int, bool, bool], tuple[int, ...]] = {}
    for name, ranks_of_ranges in destinations.items():
        dtype, first = _wire_dtype(name, params_dtype, tensors[name].dtype), first_shards[name]
        shards = trained.get(name.removesuffix(SCALE_SUFFIX), ())
        num_trained = [0] * len(ranks_of_ranges)  # elements
        for shard in shards:
            kind = (shard.rank, shard.is_expert, len(shards) == 1)
            if kind not in owners_of:
                owners_of[kind] = tuple(owner_ranks(hf, layout, shard))
            source_ranks = owners_of[kind]
            if dtype == FP8_DTYPE:
                quantised.append((shard, source_ranks))
            for number, common, ranks in joins.of(_ranges(name, shard), ranks_of_ranges):
                num_trained[number] += math.prod(shape_of(common))
                digest_rank, pairs = selector.next(source_ranks, ranks)
                transfers += [
                    Transfer(first + number, name, part, shard, dtype, pairs, digest_rank, num_bytes, round=0)
                    for part, num_bytes in cuts.of(name, common, dtype, pairs)
                ]
        problems += [
            f"training ranks hold {held} elements of {name}{list(ranges)}"
            for ranges, held in zip(ranks_of_ranges, num_trained, strict=True)
            if held != math.prod(shape_of(ranges))
        ]
    raise_problems("the weight sync", problems, "Check that both engines were given the same model.")
    assigned, num_rounds = _in_rounds(transfers, num_ranks, bucket_bytes // 2)
    numbering = first_shards, shard_tables, num_destinations_N
    return TransferPlan(assigned, tuple(quantised), *numbering, tensors, num_rounds, num_ranks)


_Destinations: TypeAlias = Mapping[Ranges, tuple[int, ...]]  # distinct shard of a tensor -> the ranks that own it


def _destinations(rollout_shards: Mapping[int, RankShards]) -> dict[str, _Destinations]:
    """HF name -> which ranks own which parts; one object for all tensors that are cut and owned alike, as most experts
    are.
    """
    ranks_of: dict[int, list[int]] = {}
    for rank, shards in rollout_shards.items():
        ranks_of.setdefault(id(shards), []).append(rank)
    owned_by: dict[str, list[tuple[int, Ranges]]] = {}
    for key, shards in _distinct(rollout_shards).items():
        for name, shard in shards.items():
            of_name = owned_by.get(name)
            if of_name is None:
                owned_by[name] = [(key, shard.ranges)]
            else:
                of_name.append((key, shard.ranges))
    made: dict[tuple[tuple[int, Ranges], ...], _Destinations] = {}
    found = {}
    for name in sorted(owned_by):
        alike = tuple(owned_by[name])
        if alike not in made:
            ranks: dict[Ranges, list[int]] = {}
            for key, ranges in alike:
                ranks.setdefault(ranges, []).extend(ranks_of[key])
            made[alike] = {ranges: tuple(sorted(members)) for ranges, members in ranks.items()}
        found[name] = made[alike]
    return found


def _distinct(rollout_shards: Mapping[int, RankShards]) -> dict[int, RankShards]:
    """The distinct objects, which several ranks may share, by their ids."""
    return {id(shards): shards for shards in rollout_shards.values()}


def _numbered(
    destinations: Mapping[str, _Destinations],
) -> tuple[dict[str, int], dict[str, dict[Ranges, int]], np.ndarray]:
    """The numbers of the distinct shards of all tensors as the plan has them, and int64 [shards] how many ranks own
    each.
    """
    first, numbers, count = {}, {}, 0
    tables: dict[int, tuple[dict[Ranges, int], np.ndarray]] = {}
    num_destinations = []
    for name, ranks_of_ranges in destinations.items():
        if id(ranks_of_ranges) not in tables:
            table = {ranges: number for number, ranges in enumerate(ranks_of_ranges)}
            tables[id(ranks_of_ranges)] = table, np.array([len(ranks) for ranks in ranks_of_ranges.values()], np.int64)
        numbers[name], counts = tables[id(ranks_of_ranges)]
        first[name] = count
        count += len(ranks_of_ranges)
        num_destinations.append(counts)
    return first, numbers, np.concatenate(num_destinations)


class _Joins:
    """Intersections of training and rollout shards, computed once for all tensors that are cut alike on both sides."""

    def __init__(self) -> None:
        self._made: dict[tuple[Ranges, int], list[tuple[int, Ranges, tuple[int, ...]]]] = {}

    def of(self, trained: Ranges, destinations: _Destinations) -> list[tuple[int, Ranges, tuple[int, ...]]]:
        """(number of the rollout shard, common elements, its ranks) of all rollout shards that overlap ``trained``."""
        key = (trained, id(destinations))
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = []
            for number, (ranges, ranks) in enumerate(destinations.items()):
                common = intersection(trained, ranges)
                if common is not None:
                    found.append((number, common, ranks))
        return found


def _ranges(name: str, shard: Shard) -> Ranges:
    """The part of tensor `name` that a training shard provides; the scale of a block counts where the block begins."""
    if not name.endswith(SCALE_SUFFIX):
        return shard.ranges
    return tuple((num_blocks(start), num_blocks(stop)) for start, stop in shard.ranges)


def _wire_dtype(name: str, params_dtype: torch.dtype, rollout_dtype: torch.dtype) -> torch.dtype:
    """The narrower of the two engines' dtypes: the wider one holds nothing more."""
    if rollout_dtype == FP8_DTYPE or name.endswith(SCALE_SUFFIX):
        return rollout_dtype
    trained = torch.float32 if always_fp32(name) else params_dtype
    return rollout_dtype if rollout_dtype.itemsize < trained.itemsize else trained


class _Cuts:
    """Cuts ranges into parts of some rows, of which a rank can send its copies in a fraction of `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._made: dict[tuple[Ranges, torch.dtype, int], list[tuple[Ranges, int]]] = {}

    def of(self, name: str, ranges: Ranges, dtype: torch.dtype, pairs: RankPairs) -> list[tuple[Ranges, int]]:
        """Every part and its bytes; the same for all tensors of this shape."""
        key = (ranges, dtype, pairs.max_copies)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = list(_cut(name, ranges, dtype, self._limit // pairs.max_copies))
        return found


def _cut(name: str, ranges: Ranges, dtype: torch.dtype, limit: int) -> Iterator[tuple[Ranges, int]]:
    (start, stop), *columns = ranges
    row_bytes = math.prod(shape_of(tuple(columns))) * dtype.itemsize
    if aligned(row_bytes) > limit:
        raise ValueError(
            f"a row of {name} has {row_bytes} bytes, and a rank that sends it to several can send {limit} to "
            "each at once: raise actor_rollout_ref.rollout.update_weights_bucket_megabytes"
        )
    num_rows = max(1, (limit // _PARTS_OF_A_ROUND - ALIGNMENT) // row_bytes)
    if dtype == FP8_DTYPE and num_rows > BLOCK:
        num_rows -= num_rows % BLOCK
    for first in range(start, stop, num_rows):
        end = min(first + num_rows, stop)
        yield ((first, end), *columns), (end - first) * row_bytes


def _in_rounds(transfers: list[Transfer], num_ranks: int, limit: int) -> tuple[tuple[Transfer, ...], int]:
    """The transfers, ordered so that all senders finish at about the same time and assigned to rounds in which no rank
    sends or receives more than `limit` bytes; and the number of rounds.
    """
    sizes = [aligned(transfer.num_bytes) for transfer in transfers]
    totals: dict[int, int] = {}
    offsets = []
    for transfer, size in zip(transfers, sizes, strict=True):
        offset = totals.get(transfer.shard.rank, 0)
        offsets.append(offset)
        totals[transfer.shard.rank] = offset + size * max(1, len(transfer.pairs.receivers_R))
    progress = np.array(offsets) / np.array([totals[transfer.shard.rank] for transfer in transfers])
    rounds, assigned = RoundAssigner(num_ranks, limit), []
    for index in np.argsort(progress, kind="stable").tolist():
        t = transfers[index]
        number = rounds.assign(t.pairs, sizes[index])
        assigned.append(t._replace(round=number))
    return tuple(assigned), rounds.num_rounds


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT

"""Who sends which elements to whom: the join of what training ranks hold and what rollout ranks hold, a pure function.

Every rank computes the same plan by itself. A rollout rank gets each element that it holds once, from itself where it
trains it too, else from a holder on its own node where there is one, and the holders take turns.
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
from megatron.core.parallel_layout import ParallelLayout
from mindspeed_llm.hf_shapes import always_fp32
from mindspeed_llm.sources import intersection
from mindspeed_llm.weight_plan import Fragment, Slice, fragments, holders, slice_shape
from verl.workers.sharding_manager.transfer_flows import Flow, Flows
from verl.workers.sharding_manager.transfer_rounds import Rounds
from vllm.model_executor.model_loader.held_slices import HeldSlice

ALIGNMENT = 8  # bytes, of every part of a message
_PARTS_OF_A_ROUND = 4  # routes are cut so that as many of one sender fit in a round


@dataclass(frozen=True)
class SliceIndex:
    """(hf name, ranges) -> index of that slice among the distinct ones that rollout ranks hold."""

    first: Mapping[str, int]  # of each tensor's slices
    places: Mapping[str, Mapping[Slice, int]]  # from there on; tensors that are cut alike share a table

    def __getitem__(self, key: tuple[str, Slice]) -> int:
        name, ranges = key
        return self.first[name] + self.places[name][ranges]

    def __len__(self) -> int:
        return sum(map(len, self.places.values()))


class Route(NamedTuple):
    """hf_tensor[ranges] in `dtype`, on its way in round `round`. A tuple, as there may be millions."""

    slice_index: int  # of what it is a part of, in TransferPlan.slices
    hf_name: str
    ranges: Slice
    fragment: Fragment
    dtype: torch.dtype
    flow: Flow
    digester: int  # the source that computes its part of the expected digest
    num_bytes: int  # of one copy
    round: int


@dataclass(frozen=True)
class TransferPlan:
    """All routes of a sync in the order in which they are packed, and the distinct slices that rollout ranks hold.

    quantised: every fragment of the weights that rollout ranks hold in FP8, with its holders.
    """

    routes: tuple[Route, ...]
    quantised: tuple[tuple[Fragment, tuple[int, ...]], ...]
    slices: SliceIndex
    num_holders_N: np.ndarray  # int64, rollout ranks that hold each slice
    hf_shapes: Mapping[str, tuple[int, ...]]
    held_dtypes: Mapping[str, torch.dtype]
    num_rounds: int
    num_ranks: int

    @cached_property
    def flows(self) -> dict[int, Flow]:
        """The distinct ones, which many routes have in common, by their ids."""
        return {id(route.flow): route.flow for route in self.routes}

    def traffic(self) -> Traffic:
        """Bytes of every rank."""
        sent, received, held, expert_received, expert_held = np.zeros((5, self.num_ranks), dtype=np.int64)
        for route in self.routes:
            flow = route.flow
            sent[flow.senders_S] += flow.copies_S * route.num_bytes
            received[flow.receivers_M] += route.num_bytes
            size = route.num_bytes // route.dtype.itemsize * self.held_dtypes[route.hf_name].itemsize
            held[flow.consumers_N] += size
            if route.fragment.is_expert:
                expert_received[flow.receivers_M] += route.num_bytes
                expert_held[flow.consumers_N] += size
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
    holdings: Mapping[int, Mapping[str, HeldSlice]],
    num_ranks: int,
    *,
    bucket_bytes: int,
    ranks_per_node: int,
) -> TransferPlan:
    """The plan of a group of `num_ranks` ranks, of which the first `layout.world_size` train.

    Args:
        holdings: rank in the group -> `held_slices` of the rollout engine there.
        bucket_bytes: of what a rank sends and receives in one round together.
    """
    consumers = _consumers(holdings)
    parts = fragments(hf, layout, "core")
    joins = _Joins()
    _check(parts, consumers, joins)
    slices, num_holders_N = _indexed(consumers)
    every = {name: held for of_rank in _distinct(holdings).values() for name, held in of_rank.items()}
    held_dtypes = {name: held.dtype for name, held in every.items()}
    flows, cuts = Flows(ranks_per_node), _Cuts(bucket_bytes // 2)
    routes: list[Route] = []
    quantised: list[tuple[Fragment, tuple[int, ...]]] = []
    holders_of: dict[tuple[int, bool, bool], tuple[int, ...]] = {}
    for name, of_name in consumers.items():
        dtype, first = _wire_dtype(name, params_dtype, held_dtypes[name]), slices.first[name]
        of_weight = parts[name.removesuffix(SCALE_SUFFIX)]
        for fragment in of_weight:
            kind = (fragment.owner, fragment.is_expert, len(of_weight) == 1)
            if kind not in holders_of:
                holders_of[kind] = tuple(holders(hf, layout, fragment))
            having = holders_of[kind]
            common = joins.of(_extent(name, fragment), of_name)
            if held_dtypes[name] == FP8_DTYPE:
                quantised.append((fragment, having))
            for place, extent, ranks in common:
                digester, flow = flows.next(having, ranks)
                routes += [
                    Route(first + place, name, part, fragment, dtype, flow, digester, num_bytes, round=0)
                    for part, num_bytes in cuts.of(name, extent, dtype, flow)
                ]
    dealt, num_rounds = _in_rounds(routes, num_ranks, bucket_bytes // 2)
    hf_shapes = {name: held.hf_shape for name, held in every.items()}
    return TransferPlan(dealt, tuple(quantised), slices, num_holders_N, hf_shapes, held_dtypes, num_rounds, num_ranks)


_Consumers: TypeAlias = Mapping[Slice, tuple[int, ...]]  # distinct slice of a tensor -> the ranks that hold it


def _consumers(holdings: Mapping[int, Mapping[str, HeldSlice]]) -> dict[str, _Consumers]:
    """HF name -> who holds what of it: one object for all tensors that are cut and held alike, as most experts are."""
    ranks_of: dict[int, list[int]] = {}
    for rank, held in holdings.items():
        ranks_of.setdefault(id(held), []).append(rank)
    held_by: dict[str, list[tuple[int, Slice]]] = {}
    for key, held in _distinct(holdings).items():
        for name, slice_ in held.items():
            of_name = held_by.get(name)
            if of_name is None:
                held_by[name] = [(key, slice_.ranges)]
            else:
                of_name.append((key, slice_.ranges))
    made: dict[tuple[tuple[int, Slice], ...], _Consumers] = {}
    found = {}
    for name in sorted(held_by):
        alike = tuple(held_by[name])
        if alike not in made:
            ranks: dict[Slice, list[int]] = {}
            for key, ranges in alike:
                ranks.setdefault(ranges, []).extend(ranks_of[key])
            made[alike] = {ranges: tuple(sorted(members)) for ranges, members in ranks.items()}
        found[name] = made[alike]
    return found


def _distinct(holdings: Mapping[int, Mapping[str, HeldSlice]]) -> dict[int, Mapping[str, HeldSlice]]:
    """Holdings that several ranks share, once each."""
    return {id(held): held for held in holdings.values()}


def _indexed(consumers: Mapping[str, _Consumers]) -> tuple[SliceIndex, np.ndarray]:
    """The distinct slices of all tensors, and int64 [slices] how many ranks hold each."""
    first, places, count = {}, {}, 0
    tables: dict[int, tuple[dict[Slice, int], np.ndarray]] = {}
    num_holders = []
    for name, of_name in consumers.items():
        if id(of_name) not in tables:
            table = {ranges: place for place, ranges in enumerate(of_name)}
            tables[id(of_name)] = table, np.array([len(ranks) for ranks in of_name.values()], dtype=np.int64)
        places[name], holders_n = tables[id(of_name)]
        first[name] = count
        count += len(of_name)
        num_holders.append(holders_n)
    return SliceIndex(first, places), np.concatenate(num_holders)


class _Joins:
    """What fragments and slices have in common, worked out once for all tensors that are cut alike on both sides."""

    def __init__(self) -> None:
        self._made: dict[tuple[Slice, int], list[tuple[int, Slice, tuple[int, ...]]]] = {}

    def of(self, extent: Slice, of_name: _Consumers) -> list[tuple[int, Slice, tuple[int, ...]]]:
        """(place of the slice, elements in common, the slice's ranks) of every slice that has some with ``extent``."""
        key = (extent, id(of_name))
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = []
            for place, (ranges, ranks) in enumerate(of_name.items()):
                common = intersection(extent, ranges)
                if common is not None:
                    found.append((place, common, ranks))
        return found


def _check(parts: Mapping[str, tuple[Fragment, ...]], consumers: Mapping[str, _Consumers], joins: _Joins) -> None:
    """ValueError naming what rollout ranks hold and no training rank has."""
    problems = []
    whole: set[tuple[int, tuple[Slice, ...]]] = set()  # that tensors cut alike have been seen to have
    for name, of_name in consumers.items():
        having = parts.get(name.removesuffix(SCALE_SUFFIX))
        if having is None:
            problems.append(f"the training model has no {name}")
            continue
        extents = tuple(_extent(name, fragment) for fragment in having)
        if (id(of_name), extents) in whole:
            continue
        covered = [0] * len(of_name)
        for extent in extents:
            for place, common, _ in joins.of(extent, of_name):
                covered[place] += math.prod(slice_shape(common))
        lacking = [
            f"training ranks hold {count} elements of {name}{list(ranges)}"
            for ranges, count in zip(of_name, covered, strict=True)
            if count != math.prod(slice_shape(ranges))
        ]
        if not lacking:
            whole.add((id(of_name), extents))
        problems += lacking
    raise_problems("the weight sync", problems, "Check that both engines were given the same model.")


def _extent(name: str, fragment: Fragment) -> Slice:
    """What a fragment holds of tensor `name`; a block's scale is where the block begins."""
    if not name.endswith(SCALE_SUFFIX):
        return fragment.piece.hf_slice
    return tuple((num_blocks(start), num_blocks(stop)) for start, stop in fragment.piece.hf_slice)


def _wire_dtype(name: str, params_dtype: torch.dtype, held_dtype: torch.dtype) -> torch.dtype:
    """The narrower of the two engines' dtypes: the wider one holds nothing more."""
    if held_dtype == FP8_DTYPE or name.endswith(SCALE_SUFFIX):
        return held_dtype
    trained = torch.float32 if always_fp32(name) else params_dtype
    return held_dtype if held_dtype.itemsize < trained.itemsize else trained


class _Cuts:
    """Slices in parts of some rows, of which a rank can send its copies in a fraction of `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._made: dict[tuple[Slice, torch.dtype, int], list[tuple[Slice, int]]] = {}

    def of(self, name: str, ranges: Slice, dtype: torch.dtype, flow: Flow) -> list[tuple[Slice, int]]:
        """Every part and its bytes; the same for all tensors of this shape."""
        key = (ranges, dtype, flow.most_copies)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = list(_cut(name, ranges, dtype, self._limit // flow.most_copies))
        return found


def _cut(name: str, ranges: Slice, dtype: torch.dtype, limit: int) -> Iterator[tuple[Slice, int]]:
    (start, stop), *columns = ranges
    row_bytes = math.prod(slice_shape(tuple(columns))) * dtype.itemsize
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


def _in_rounds(routes: list[Route], num_ranks: int, limit: int) -> tuple[tuple[Route, ...], int]:
    """Routes in an order in which all senders come to their ends together, dealt out to rounds in which no rank sends
    or receives more than `limit` bytes; and the number of rounds.
    """
    sizes = [aligned(route.num_bytes) for route in routes]
    totals: dict[int, int] = {}
    places = []
    for route, size in zip(routes, sizes, strict=True):
        place = totals.get(route.fragment.owner, 0)
        places.append(place)
        totals[route.fragment.owner] = place + size * max(1, len(route.flow.receivers_M))
    shares_N = np.array(places) / np.array([totals[route.fragment.owner] for route in routes])
    rounds, dealt = Rounds(num_ranks, limit), []
    for index in np.argsort(shares_N, kind="stable").tolist():
        r = routes[index]
        number = rounds.place(r.flow, sizes[index])
        dealt.append(
            Route(r.slice_index, r.hf_name, r.ranges, r.fragment, r.dtype, r.flow, r.digester, r.num_bytes, number)
        )
    return tuple(dealt), rounds.count


def aligned(num_bytes: int) -> int:
    """Bytes that a part of a message takes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT

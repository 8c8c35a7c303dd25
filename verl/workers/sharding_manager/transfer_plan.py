"""Who sends which elements to whom: the join of what training ranks hold and what rollout ranks hold, a pure function.

Every rank computes the same plan by itself. A rollout rank gets each element that it holds once, from itself where it
trains it too, else from a holder on its own node where there is one, and the holders take turns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from megatron.core.parallel_layout import ParallelLayout
from mindspeed_llm.hf_config import HFModelConfig
from mindspeed_llm.hf_shapes import always_fp32
from mindspeed_llm.sources import intersection, raise_problems
from mindspeed_llm.weight_plan import Fragment, Slice, fragments, holders, slice_shape
from vllm.model_executor.layers.quantization.fp8 import BLOCK, FP8_DTYPE, SCALE_SUFFIX, num_blocks
from vllm.model_executor.model_loader.held_slices import HeldSlice

ALIGNMENT = 8  # bytes, of every part of a message
_OPEN_ROUNDS = 8
_PARTS_OF_A_ROUND = 4  # routes are cut so that as many of one sender fit in a round


@dataclass(frozen=True, slots=True)
class Cell:
    """The elements that a fragment and a rollout rank's slice have in common; scales count as part of their weight."""

    index: int  # of the slice, in TransferPlan.slices
    hf_name: str
    ranges: Slice
    fragment: Fragment
    holders: tuple[int, ...]  # of the fragment


@dataclass(frozen=True)
class Flow:
    """Consumer i gets what it needs from sources_N[i], itself where it is a holder."""

    sources_N: np.ndarray
    consumers_N: np.ndarray
    receivers_M: np.ndarray  # the consumers that are not their own source
    senders_S: np.ndarray
    copies_S: np.ndarray  # that each of them sends


@dataclass(frozen=True, slots=True)
class Route:
    """hf_tensor[ranges] in `dtype`, on its way in round `round`."""

    index: int  # of the slice that it is a part of, in TransferPlan.slices
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
    """All routes of a sync in the order in which they are packed, and the distinct slices that rollout ranks hold."""

    routes: tuple[Route, ...]
    cells: tuple[Cell, ...]
    slices: Mapping[tuple[str, Slice], int]  # (hf name, ranges) -> its index
    num_holders_N: np.ndarray  # int64, rollout ranks that hold each slice
    hf_shapes: Mapping[str, tuple[int, ...]]
    held_dtypes: Mapping[str, torch.dtype]
    num_rounds: int
    num_ranks: int

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
    _check(parts, consumers)
    keys = ((name, ranges) for name, of_name in consumers.items() for ranges in of_name)
    slices = {key: index for index, key in enumerate(keys)}
    every = {name: held for of_rank in holdings.values() for name, held in of_rank.items()}
    held_dtypes = {name: held.dtype for name, held in every.items()}
    flows, cells = _Flows(ranks_per_node), []
    routes: list[Route] = []
    holders_of: dict[tuple[int, bool, bool], tuple[int, ...]] = {}
    for name, of_name in consumers.items():
        dtype = _wire_dtype(name, params_dtype, held_dtypes[name])
        for fragment in parts[name.removesuffix(SCALE_SUFFIX)]:
            kind = (fragment.owner, fragment.is_expert, len(parts[fragment.piece.hf_name]) == 1)
            if kind not in holders_of:
                holders_of[kind] = tuple(holders(hf, layout, fragment))
            extent = _extent(name, fragment)
            for ranges, ranks in of_name.items():
                common = intersection(extent, ranges)
                if common is not None:
                    digester, flow = flows.next(holders_of[kind], ranks)
                    cell = Cell(slices[name, ranges], name, common, fragment, holders_of[kind])
                    cells.append(cell)
                    routes += _cut(cell, dtype, flow, digester, bucket_bytes // 2)
    dealt, num_rounds = _in_rounds(routes, num_ranks, bucket_bytes // 2)
    hf_shapes = {name: held.hf_shape for name, held in every.items()}
    num_holders_N = np.array([len(ranks) for of_name in consumers.values() for ranks in of_name.values()])
    return TransferPlan(dealt, tuple(cells), slices, num_holders_N, hf_shapes, held_dtypes, num_rounds, num_ranks)


def _consumers(holdings: Mapping[int, Mapping[str, HeldSlice]]) -> dict[str, dict[Slice, tuple[int, ...]]]:
    """HF name -> distinct slice of it -> the ranks that hold it."""
    found: dict[str, dict[Slice, list[int]]] = {}
    for rank, held in holdings.items():
        for name, slice_ in held.items():
            of_name = found.get(name)
            if of_name is None:
                of_name = found[name] = {}
            ranks = of_name.get(slice_.ranges)
            if ranks is None:
                of_name[slice_.ranges] = [rank]
            else:
                ranks.append(rank)
    return {
        name: {ranges: tuple(ranks) for ranges, ranks in of_name.items()} for name, of_name in sorted(found.items())
    }


def _check(parts: Mapping[str, tuple[Fragment, ...]], consumers: Mapping[str, Mapping[Slice, tuple[int, ...]]]) -> None:
    """ValueError naming what rollout ranks hold and no training rank has."""
    problems = []
    for name, of_name in consumers.items():
        having = parts.get(name.removesuffix(SCALE_SUFFIX))
        if having is None:
            problems.append(f"the training model has no {name}")
            continue
        for ranges in of_name:
            if len(having) == 1 and ranges == _extent(name, having[0]):
                continue  # most are whole experts
            common = (intersection(_extent(name, fragment), ranges) for fragment in having)
            covered = sum(math.prod(slice_shape(part)) for part in common if part is not None)
            if covered != math.prod(slice_shape(ranges)):
                problems.append(f"training ranks hold {covered} elements of {name}{list(ranges)}")
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


class _Flows:
    """Who sends to whom: near holders first, and the holders of a fragment in turns, over consumers and fragments."""

    def __init__(self, ranks_per_node: int) -> None:
        self._ranks_per_node = ranks_per_node
        self._turns: dict[tuple[int, ...], int] = {}
        self._made: dict[tuple[tuple[int, ...], tuple[int, ...], int], Flow] = {}

    def next(self, holders: tuple[int, ...], consumers: tuple[int, ...]) -> tuple[int, Flow]:
        """The flow that begins with the holder whose turn it is, and one of its sources, these in turns too."""
        turn = self._turns.get(holders, 0)
        self._turns[holders] = (turn + 1) % len(holders)
        key = (holders, consumers, turn)
        if key not in self._made:
            self._made[key] = self._make(np.array(holders), np.array(consumers), turn)
        sources_N = self._made[key].sources_N
        return int(sources_N[turn % len(sources_N)]), self._made[key]

    def _make(self, holders_H: np.ndarray, consumers_N: np.ndarray, turn: int) -> Flow:
        nodes_H, nodes_N = holders_H // self._ranks_per_node, consumers_N // self._ranks_per_node
        first_N, stop_N = np.searchsorted(nodes_H, nodes_N, "left"), np.searchsorted(nodes_H, nodes_N, "right")
        turns_N = np.arange(len(consumers_N)) + turn
        near_N = first_N + turns_N % np.maximum(stop_N - first_N, 1)
        chosen_N = holders_H[np.where(stop_N > first_N, near_N, turns_N % len(holders_H))]
        sources_N = np.where(np.isin(consumers_N, holders_H), consumers_N, chosen_N)
        is_remote_N = sources_N != consumers_N
        senders_S, copies_S = np.unique(sources_N[is_remote_N], return_counts=True)
        return Flow(sources_N, consumers_N, consumers_N[is_remote_N], senders_S, copies_S)


def _cut(cell: Cell, dtype: torch.dtype, flow: Flow, digester: int, limit: int) -> Iterator[Route]:
    """The cell in parts of some rows, of which a rank can send its copies in a fraction of `limit` bytes."""
    (start, stop), *columns = cell.ranges
    row_bytes = math.prod(slice_shape(tuple(columns))) * dtype.itemsize
    limit //= int(flow.copies_S.max(initial=1))
    if aligned(row_bytes) > limit:
        raise ValueError(
            f"a row of {cell.hf_name} has {row_bytes} bytes, and a rank that sends it to several can send {limit} to "
            "each at once: raise actor_rollout_ref.rollout.update_weights_bucket_megabytes"
        )
    num_rows = max(1, (limit // _PARTS_OF_A_ROUND - ALIGNMENT) // row_bytes)
    if dtype == FP8_DTYPE and num_rows > BLOCK:
        num_rows -= num_rows % BLOCK
    for first in range(start, stop, num_rows):
        end = min(first + num_rows, stop)
        part = ((first, end), *columns)
        num_bytes = (end - first) * row_bytes
        yield Route(cell.index, cell.hf_name, part, cell.fragment, dtype, flow, digester, num_bytes, round=0)


def _in_rounds(routes: list[Route], num_ranks: int, limit: int) -> tuple[tuple[Route, ...], int]:
    """Routes in an order in which all senders come to their ends together, dealt out to rounds in which no rank sends
    or receives more than `limit` bytes; and the number of rounds.
    """
    weights = [aligned(route.num_bytes) * max(1, len(route.flow.receivers_M)) for route in routes]
    totals: dict[int, int] = {}
    places = []
    for route, weight in zip(routes, weights, strict=True):
        places.append(totals.get(route.fragment.owner, 0))
        totals[route.fragment.owner] = places[-1] + weight
    order = sorted(range(len(routes)), key=lambda i: places[i] / totals[routes[i].fragment.owner])
    rounds, dealt = _Rounds(num_ranks, limit), []
    for index in order:
        r = routes[index]
        number = rounds.place(r.flow, aligned(r.num_bytes))
        dealt.append(Route(r.index, r.hf_name, r.ranges, r.fragment, r.dtype, r.flow, r.digester, r.num_bytes, number))
    return tuple(dealt), rounds.count


class _Rounds:
    """The bytes that every rank sends and receives in the last rounds, which are still open."""

    def __init__(self, num_ranks: int, limit: int) -> None:
        self._limit = limit
        self._sent, self._received = np.zeros((2, _OPEN_ROUNDS, num_ranks), dtype=np.int64)
        self._first = 0  # open round
        self.count = 1

    def place(self, flow: Flow, size: int) -> int:
        """The first open round in which every rank of the flow has room, a new one if there is none."""
        senders, receivers, added = flow.senders_S, flow.receivers_M, flow.copies_S * size
        if len(receivers) == 1:  # an expert: most routes are, and single columns are quicker to look at
            fits_R = (self._sent[:, senders[0]] + size <= self._limit) & (
                self._received[:, receivers[0]] + size <= self._limit
            )
        else:
            fits_R = (self._sent[:, senders] + added <= self._limit).all(axis=1)
            fits_R &= (self._received[:, receivers] + size <= self._limit).all(axis=1)
        slot = int(fits_R.argmax())
        if not fits_R[slot]:
            self._sent, self._received = (np.roll(loads, -1, axis=0) for loads in (self._sent, self._received))
            slot = _OPEN_ROUNDS - 1
            self._sent[slot], self._received[slot] = 0, 0
            self._first += 1
        self._sent[slot, senders] += added
        self._received[slot, receivers] += size
        self.count = max(self.count, self._first + slot + 1)
        return self._first + slot


def aligned(num_bytes: int) -> int:
    """Bytes that a part of a message takes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT

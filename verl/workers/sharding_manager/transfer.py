"""The way of the weights: packed by their holders, a round of buckets at a time, and unpacked where they are held."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hf_formats.fp8 import FP8_DTYPE
from mindspeed_llm.weight_plan import slice_shape
from verl.workers.sharding_manager.trained_weights import TrainedWeights
from verl.workers.sharding_manager.transfer_flows import Flow
from verl.workers.sharding_manager.transfer_plan import Route, TransferPlan, aligned
from vllm.model_executor.model_loader.digest import add_digest, copy_with_digests, inner_dim
from vllm.model_executor.model_loader.slice_intake import WeightSlice

_PIECE_BYTES = 1 << 20  # of a weight that its digest is taken of at a time: caches keep them for who reads them next


class Parcel(NamedTuple):
    """A route's bytes from `offset` on of the buffer that a rank sends or receives in a round."""

    route: Route
    offset: int


@dataclass(frozen=True)
class Round:
    """What one rank does in a round; bytes by rank of the group."""

    kept: tuple[Route, ...]  # from its training weights to its rollout weights, without a buffer
    sent: tuple[Parcel, ...]
    received: tuple[Parcel, ...]
    sent_bytes: list[int]
    received_bytes: list[int]


def schedule(plan: TransferPlan, rank: int) -> list[Round]:
    """The rounds of `rank`; a message to a rank holds its routes in the order of the plan, so both sides agree."""
    kept: list[list[Route]] = [[] for _ in range(plan.num_rounds)]
    sent: list[dict[int, list[Route]]] = [{} for _ in range(plan.num_rounds)]
    received: list[dict[int, list[Route]]] = [{} for _ in range(plan.num_rounds)]
    parts = {key: _part(flow, rank) for key, flow in plan.flows.items()}
    mine = {key for key, part in parts.items() if part != (None, [])}
    for route in [route for route in plan.routes if id(route.flow) in mine]:
        source, consumers = parts[id(route.flow)]
        if source == rank:
            kept[route.round].append(route)
        elif source is not None:
            received[route.round].setdefault(source, []).append(route)
        for consumer in consumers:
            sent[route.round].setdefault(consumer, []).append(route)
    return [
        Round(
            tuple(here),
            _parcels(outgoing),
            _parcels(incoming),
            _sizes(outgoing, plan.num_ranks),
            _sizes(incoming, plan.num_ranks),
        )
        for here, outgoing, incoming in zip(kept, sent, received, strict=True)
    ]


def _part(flow: Flow, rank: int) -> tuple[int | None, list[int]]:
    """(who `rank` gets it from, None when it needs nothing; whom it sends it to)."""
    sources = flow.sources_N[flow.consumers_N == rank].tolist()
    is_sent = (flow.sources_N == rank) & (flow.consumers_N != rank)
    return (sources[0] if sources else None), flow.consumers_N[is_sent].tolist()


def _given(round_: Round) -> Iterator[Route]:
    """What this rank gives of its training weights, to itself and to others."""
    yield from round_.kept
    yield from (parcel.route for parcel in round_.sent)


def _parcels(by_peer: Mapping[int, list[Route]]) -> tuple[Parcel, ...]:
    parcels, offset = [], 0
    for peer in sorted(by_peer):
        for route in by_peer[peer]:
            parcels.append(Parcel(route, offset))
            offset += aligned(route.num_bytes)
    return tuple(parcels)


def _sizes(by_peer: Mapping[int, list[Route]], num_ranks: int) -> list[int]:
    return [sum(aligned(route.num_bytes) for route in by_peer.get(peer, ())) for peer in range(num_ranks)]


class WeightTransfer:
    """One rank's part in the rounds of a plan.

    While a round travels the next is packed and the one before is unpacked; a round's buffers have at most the plan's
    bucket together, so that two buckets are the most there is. The digests that the rollout engines should have are
    summed up on the way: of the training weights, not of what is sent, while these are read to be packed.

    Attributes:
        sums_N: int64 [slices of the plan], of the last run: this rank's part of each digest, in the dtype held.
    """

    def __init__(self, plan: TransferPlan, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rounds = schedule(plan, group.rank())
        self.plan, self.group, self.device = plan, group, device
        self.sums_N = torch.zeros(len(plan.slices), dtype=torch.int64, device=device)
        mine = (route for round_ in self.rounds for route in _given(round_) if route.digester == group.rank())
        self._totals = {route.slice_index: self.sums_N[route.slice_index] for route in mine}

    @property
    def peak_bytes(self) -> int:
        """Of all buffers that are alive together at some time."""
        sizes = [(sum(round_.sent_bytes), sum(round_.received_bytes)) for round_ in self.rounds] + [(0, 0)]
        return max(
            received + following_sent + max(sent, following_received)
            for (sent, received), (following_sent, following_received) in pairwise(sizes)
        )

    def slices(self, trained: TrainedWeights) -> Iterator[WeightSlice]:
        """Everything that this rank's rollout engine holds; nothing where there is none.

        Collective over the group: every rank runs it to its end. A slice may share memory with a buffer or with the
        training weights: copy it before the next one.
        """
        self.sums_N.zero_()
        travelling = self._start(self.rounds[0], self._pack(self.rounds[0], trained))
        for index, round_ in enumerate(self.rounds):
            following = self.rounds[index + 1] if index + 1 < len(self.rounds) else None
            packed = None if following is None else self._pack(following, trained)
            arrived = travelling.wait()
            if following is not None and packed is not None:
                travelling = self._start(following, packed)
                del packed
            for route in round_.kept:
                values = trained.values(route.hf_name, route.ranges, route.fragment)
                if route.digester != self.group.rank():
                    yield _slice(route, values)
                elif self._is_summed_on_its_way(route, values):
                    yield _slice(route, values, self._totals[route.slice_index])
                else:
                    for starts, piece in _pieces(route, values):
                        self._add_digest(route, starts, piece)
                        yield WeightSlice(route.hf_name, starts, piece)
            for parcel in round_.received:
                yield _slice(parcel.route, arrived.view(parcel))
            del arrived

    def _pack(self, round_: Round, trained: TrainedWeights) -> _Bucket:
        """What the round sends; what goes to several ranks is taken from the weights once."""
        bucket = _Bucket(round_.sent_bytes, self.device)
        first: dict[int, Parcel] = {}
        rank = self.group.rank()
        for parcel in round_.sent:
            route, view = parcel.route, bucket.view(parcel)
            earlier = first.setdefault(id(route), parcel)
            if earlier is not parcel:
                view.copy_(bucket.view(earlier))
                continue
            values = trained.values(route.hf_name, route.ranges, route.fragment)
            if route.digester != rank or rank in route.flow.consumers_N:  # the latter is counted where it is kept
                view.copy_(values)
            elif self._is_summed_on_its_way(route, values):
                copy_with_digests(
                    route.hf_name, view, values, _starts(route), of_values=self._totals[route.slice_index]
                )
            else:
                view.copy_(values)
                for starts, piece in _pieces(route, values):
                    self._add_digest(route, starts, piece)
        return bucket

    def _is_summed_on_its_way(self, route: Route, values: Tensor) -> bool:
        """Whether the values are those that rollout engines hold."""
        return values.dtype == self.plan.held_dtypes[route.hf_name]

    def _add_digest(self, route: Route, starts: tuple[int, ...], piece: Tensor) -> None:
        dtype = self.plan.held_dtypes[route.hf_name]
        assert piece.dtype == dtype or dtype != FP8_DTYPE, route.hf_name
        add_digest(self._totals[route.slice_index], route.hf_name, piece.to(dtype), starts)

    def _start(self, round_: Round, packed: _Bucket) -> _Travelling:
        arriving = _Bucket(round_.received_bytes, self.device)
        work = dist.all_to_all_single(
            arriving.bytes, packed.bytes, round_.received_bytes, round_.sent_bytes, group=self.group, async_op=True
        )
        return _Travelling(work, packed, arriving)


class _Bucket:
    """uint8 [bytes to or from all ranks] of a round, and what lies in it."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.bytes = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        self._typed: dict[torch.dtype, Tensor] = {}

    def view(self, parcel: Parcel) -> Tensor:
        """The route's part in the shape of its slice, laid out as a trainer's memory is."""
        route = parcel.route
        typed = self._typed.get(route.dtype)
        if typed is None:
            typed = self._typed[route.dtype] = self.bytes.view(route.dtype)
        shape = slice_shape(route.ranges)
        stride = (1, shape[0]) if inner_dim(route.hf_name) == 0 else (*shape[1:], 1)
        return typed.as_strided(shape, stride, parcel.offset // route.dtype.itemsize)


@dataclass
class _Travelling:
    work: dist.Work | None
    packed: _Bucket | None  # kept until it has been sent
    arriving: _Bucket

    def wait(self) -> _Bucket:
        """What has arrived; what was sent is let go."""
        assert self.work is not None, "waited for twice"
        self.work.wait()
        self.work = self.packed = None
        return self.arriving


def _pieces(route: Route, values: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """The route's values in parts of some rows of the training weight's memory, each with its place in the tensor."""
    starts = list(_starts(route))
    dim = 1 if inner_dim(route.hf_name) == 0 else 0
    step = max(1, _PIECE_BYTES * values.shape[dim] // values.nbytes)
    for piece in values.split(step, dim):
        yield tuple(starts), piece
        starts[dim] += piece.shape[dim]


def _slice(route: Route, values: Tensor, total: Tensor | None = None) -> WeightSlice:
    return WeightSlice(route.hf_name, _starts(route), values, total)


def _starts(route: Route) -> tuple[int, ...]:
    return tuple(start for start, _ in route.ranges)

"""Runs the transfers of a plan: in each round a rank packs what it sends and unpacks what it has received."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from hf_formats.fp8 import FP8_DTYPE
from hf_formats.ranges import shape_of
from verl.workers.weight_sync.plan import Transfer, TransferPlan, aligned
from verl.workers.weight_sync.rounds import RankPairs
from verl.workers.weight_sync.trained_weights import TrainedWeights
from vllm.model_executor.model_loader.digest import add_digest, copy_with_digests, inner_dim, piece_bytes
from vllm.model_executor.model_loader.shard_writer import WeightUpdate

Packed: TypeAlias = tuple[Transfer, int]
"""A transfer and the offset of its bytes in the buffer that a rank sends or receives in a round."""


@dataclass(frozen=True)
class Round:
    """What one rank does in a round; bytes by rank of the group."""

    local: tuple[Transfer, ...]  # from its training weights to its rollout weights, without a buffer
    sent: tuple[Packed, ...]
    received: tuple[Packed, ...]
    sent_bytes: list[int]
    received_bytes: list[int]

    @property
    def sources(self) -> Iterator[Transfer]:
        """The transfers for which this rank reads its training weights."""
        yield from self.local
        yield from (transfer for transfer, _ in self.sent)


def rank_rounds(plan: TransferPlan, rank: int) -> list[Round]:
    """The rounds of `rank`; a message holds its transfers in the order of the plan, so that both sides agree."""
    local: list[list[Transfer]] = [[] for _ in range(plan.num_rounds)]
    sent: list[dict[int, list[Transfer]]] = [{} for _ in range(plan.num_rounds)]
    received: list[dict[int, list[Transfer]]] = [{} for _ in range(plan.num_rounds)]
    peers = {key: _peers(pairs, rank) for key, pairs in plan.rank_pairs.items()}
    mine = {key for key, found in peers.items() if found != (None, [])}
    for transfer in [transfer for transfer in plan.transfers if id(transfer.pairs) in mine]:
        source, destinations = peers[id(transfer.pairs)]
        if source == rank:
            local[transfer.round].append(transfer)
        elif source is not None:
            received[transfer.round].setdefault(source, []).append(transfer)
        for destination in destinations:
            sent[transfer.round].setdefault(destination, []).append(transfer)
    return [
        Round(
            tuple(here),
            _packed(outgoing),
            _packed(incoming),
            _sizes(outgoing, plan.num_ranks),
            _sizes(incoming, plan.num_ranks),
        )
        for here, outgoing, incoming in zip(local, sent, received, strict=True)
    ]


def _peers(pairs: RankPairs, rank: int) -> tuple[int | None, list[int]]:
    """(the source of `rank`, None when it is no destination; the other ranks to which it sends)."""
    sources = pairs.sources_D[pairs.destinations_D == rank].tolist()
    is_sent_D = (pairs.sources_D == rank) & (pairs.destinations_D != rank)
    return (sources[0] if sources else None), pairs.destinations_D[is_sent_D].tolist()


def _packed(by_peer: Mapping[int, list[Transfer]]) -> tuple[Packed, ...]:
    packed, offset = [], 0
    for peer in sorted(by_peer):
        for transfer in by_peer[peer]:
            packed.append((transfer, offset))
            offset += aligned(transfer.num_bytes)
    return tuple(packed)


def _sizes(by_peer: Mapping[int, list[Transfer]], num_ranks: int) -> list[int]:
    return [sum(aligned(transfer.num_bytes) for transfer in by_peer.get(peer, ())) for peer in range(num_ranks)]


class WeightTransfer:
    """One rank's part in the rounds of a plan.

    While a round is in flight the next one is packed and the one before is unpacked; the buffers of a round have at
    most the plan's bucket together, so at most two buckets are in memory. The digests that the rollout engines should
    find are summed up from the training weights, while these are read to be packed.

    Attributes:
        sums_N: int64 [shards of the plan], of the last run: this rank's part of each digest, in the rollout dtype.
    """

    def __init__(self, plan: TransferPlan, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rounds = rank_rounds(plan, group.rank())
        self.plan, self.group, self.device = plan, group, device
        self.sums_N = torch.zeros(len(plan.shard_index), dtype=torch.int64, device=device)
        sources = (transfer for round_ in self.rounds for transfer in round_.sources)
        mine = (transfer for transfer in sources if transfer.digest_rank == group.rank())
        self._totals = {transfer.rollout_shard: self.sums_N[transfer.rollout_shard] for transfer in mine}

    @property
    def peak_bytes(self) -> int:
        """The most bytes of buffers that are in memory at the same time."""
        sizes = [(sum(round_.sent_bytes), sum(round_.received_bytes)) for round_ in self.rounds] + [(0, 0)]
        return max(
            received + following_sent + max(sent, following_received)
            for (sent, received), (following_sent, following_received) in pairwise(sizes)
        )

    def updates(self, trained: TrainedWeights) -> Iterator[WeightUpdate]:
        """Everything that this rank's rollout engine owns; nothing where there is no engine.

        Collective over the group: every rank runs it to its end. An update may share memory with a buffer or with the
        training weights: copy it before the next one.
        """
        self.sums_N.zero_()
        in_flight = self._start(self.rounds[0], self._pack(self.rounds[0], trained))
        for index, round_ in enumerate(self.rounds):
            following = self.rounds[index + 1] if index + 1 < len(self.rounds) else None
            packed = None if following is None else self._pack(following, trained)
            arrived = in_flight.wait()
            if following is not None and packed is not None:
                in_flight = self._start(following, packed)
                del packed
            for transfer in round_.local:
                values = trained.values(transfer.hf_name, transfer.ranges, transfer.shard)
                if transfer.digest_rank != self.group.rank():
                    yield _update(transfer, values)
                elif self._has_rollout_dtype(transfer, values):  # whoever copies the values adds their digest
                    yield _update(transfer, values, self._totals[transfer.rollout_shard])
                else:
                    for starts, band in _bands(transfer, values):
                        self._add_digest(transfer, starts, band)
                        yield WeightUpdate(transfer.hf_name, starts, band)
            for transfer, offset in round_.received:
                yield _update(transfer, arrived.view(transfer, offset))
            del arrived

    def _pack(self, round_: Round, trained: TrainedWeights) -> _Bucket:
        """What the round sends; values that go to several ranks are read from the weights once."""
        bucket = _Bucket(round_.sent_bytes, self.device)
        first: dict[int, Tensor] = {}
        rank = self.group.rank()
        for transfer, offset in round_.sent:
            view = bucket.view(transfer, offset)
            earlier = first.setdefault(id(transfer), view)
            if earlier is not view:
                view.copy_(earlier)
                continue
            values = trained.values(transfer.hf_name, transfer.ranges, transfer.shard)
            # A rank that also keeps the values adds their digest when it copies these.
            if transfer.digest_rank != rank or rank in transfer.pairs.destinations_D:
                view.copy_(values)
            elif self._has_rollout_dtype(transfer, values):
                total = self._totals[transfer.rollout_shard]
                copy_with_digests(transfer.hf_name, view, values, _starts(transfer), of_values=total)
            else:
                view.copy_(values)
                for starts, band in _bands(transfer, values):
                    self._add_digest(transfer, starts, band)
        return bucket

    def _has_rollout_dtype(self, transfer: Transfer, values: Tensor) -> bool:
        """Whether the values are those that the rollout engines store, so that a copy can take their digest."""
        return values.dtype == self.plan.rollout_dtypes[transfer.hf_name]

    def _add_digest(self, transfer: Transfer, starts: tuple[int, ...], band: Tensor) -> None:
        dtype = self.plan.rollout_dtypes[transfer.hf_name]
        assert band.dtype == dtype or dtype != FP8_DTYPE, transfer.hf_name
        add_digest(self._totals[transfer.rollout_shard], transfer.hf_name, band.to(dtype), starts)

    def _start(self, round_: Round, packed: _Bucket) -> _InFlight:
        arriving = _Bucket(round_.received_bytes, self.device)
        work = dist.all_to_all_single(
            arriving.bytes, packed.bytes, round_.received_bytes, round_.sent_bytes, group=self.group, async_op=True
        )
        return _InFlight(work, packed, arriving)


class _Bucket:
    """uint8 [bytes to or from all ranks] of a round, and the transfers in it."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.bytes = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        self._typed: dict[torch.dtype, Tensor] = {}

    def view(self, transfer: Transfer, offset: int) -> Tensor:
        """The values of a transfer in the shape of its ranges, in the order of the trainer's memory."""
        typed = self._typed.get(transfer.dtype)
        if typed is None:
            typed = self._typed[transfer.dtype] = self.bytes.view(transfer.dtype)
        shape = shape_of(transfer.ranges)
        stride = (1, shape[0]) if inner_dim(transfer.hf_name) == 0 else (*shape[1:], 1)
        return typed.as_strided(shape, stride, offset // transfer.dtype.itemsize)


@dataclass
class _InFlight:
    """An all-to-all that has been started."""

    work: dist.Work | None
    packed: _Bucket | None  # referenced until it has been sent
    arriving: _Bucket

    def wait(self) -> _Bucket:
        assert self.work is not None, "waited for twice"
        self.work.wait()
        self.work = self.packed = None
        return self.arriving


def _bands(transfer: Transfer, values: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """(starts, part) of the values, cut into bands of some rows of the training weight's memory: those of a band that a
    digest has read are still in the caches for the next reader.
    """
    starts = list(_starts(transfer))
    dim = 1 if inner_dim(transfer.hf_name) == 0 else 0
    step = max(1, piece_bytes(values.device) * values.shape[dim] // values.nbytes)
    for band in values.split(step, dim):
        yield tuple(starts), band
        starts[dim] += band.shape[dim]


def _update(transfer: Transfer, values: Tensor, total: Tensor | None = None) -> WeightUpdate:
    return WeightUpdate(transfer.hf_name, _starts(transfer), values, total)


def _starts(transfer: Transfer) -> tuple[int, ...]:
    return tuple(start for start, _ in transfer.ranges)

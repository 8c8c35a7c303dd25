"""What one rank does in each round of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from verl.workers.weight_sync.plan import Transfer, TransferPlan, aligned
from verl.workers.weight_sync.rounds import RankPairs

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

"""Whether the ranks' calls match: every collective has all its members, every send its receive, without a cycle."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tools.plan.collectives import POINT_TO_POINT, Collective, Phase

MAX_SHOWN = 8


@dataclass
class _Rank:
    """The state of one rank: its calls with their phases, and the index of the next one."""

    calls: list[tuple[str, Collective]]
    at: int = 0
    counts: dict[tuple[int, ...], int] = field(default_factory=dict)  # collectives of each group so far

    @property
    def is_done(self) -> bool:
        return self.at == len(self.calls)

    @property
    def phase(self) -> str:
        return self.calls[min(self.at, len(self.calls) - 1)][0]


def problems(of_ranks: Mapping[int, Sequence[Phase]]) -> list[str]:
    """Everything that would hang or corrupt a run whose ranks make their calls in order, one sentence each.

    A collective ends when all members have come to it, and they must have come to the same one, in one phase. Sends do
    not wait, receives wait for their send; neighbouring sends and receives of a rank are posted together. ``of_ranks``
    has every rank that is a member of any group.
    """
    ranks = {
        rank: _Rank([(phase.name, call) for phase in phases for call in phase.calls])
        for rank, phases in of_ranks.items()
    }
    found = [
        f"rank {rank}, {phase}: {call} has the member {member}, which is not part of the plan"
        for rank, state in ranks.items()
        for phase, call in state.calls
        for member in set(call.ranks) - ranks.keys()
    ]
    if found:
        return found[:MAX_SHOWN]
    return _run(ranks)


def _run(ranks: Mapping[int, _Rank]) -> list[str]:
    sent: dict[tuple[int, int], deque[tuple[str, Collective]]] = defaultdict(deque)
    waiting: dict[tuple[tuple[int, ...], int], dict[int, tuple[str, Collective]]] = defaultdict(dict)
    found: list[str] = []
    active = deque(ranks)
    blocked_on: dict[int, set[int]] = defaultdict(set)  # source of a message -> who waits for it
    while active and len(found) < MAX_SHOWN:
        rank = active.popleft()
        state = ranks[rank]
        while not state.is_done:
            phase, call = state.calls[state.at]
            if call.kind in POINT_TO_POINT:
                woken = _post(rank, state, sent)
                active.extend(source for target in woken for source in blocked_on.pop((target), ()))
                waits_for = _receive(rank, state, sent, found)
                if waits_for is not None:
                    blocked_on[waits_for].add(rank)
                    break
                continue
            key = (call.ranks, state.counts.get(call.ranks, 0))
            here = waiting[key]
            here[rank] = (phase, call)
            if len(here) < len(call.ranks):
                break
            del waiting[key]
            found += _differences(here)
            for member in call.ranks:
                other = ranks[member]
                other.counts[call.ranks] = key[1] + 1
                other.at += 1
                if member != rank:
                    active.append(member)
    if not found:
        found = _stuck(ranks, waiting, sent)
    return found[:MAX_SHOWN]


def _batch(state: _Rank) -> range:
    """Indices of the neighbouring sends and receives from the present call on."""
    end = state.at
    while end < len(state.calls) and state.calls[end][1].kind in POINT_TO_POINT:
        end += 1
    return range(state.at, end)


def _post(rank: int, state: _Rank, sent: dict[tuple[int, int], deque[tuple[str, Collective]]]) -> list[int]:
    """Post the sends of the batch that begins here, once; returns this rank when anything was sent."""
    posted = []
    for index in _batch(state):
        phase, call = state.calls[index]
        if call.kind == "send":
            sent[rank, call.peer].append((phase, call))
            state.calls[index] = (phase, call._replace(kind="sent"))
            posted = [rank]
    return posted


def _receive(
    rank: int, state: _Rank, sent: dict[tuple[int, int], deque[tuple[str, Collective]]], found: list[str]
) -> int | None:
    """Pass the sends and the receives that have their message; return the rank that the next receive waits for."""
    while not state.is_done:
        phase, call = state.calls[state.at]
        if call.kind == "recv":
            arrived = sent[call.peer, rank]
            if not arrived:
                return call.peer
            from_phase, message = arrived.popleft()
            if (from_phase, message.sent, message.dtype) != (phase, call.received, call.dtype):
                found.append(
                    f"rank {rank}, {phase}: receives {call.received:,} {call.dtype} from rank {call.peer}, which sends "
                    f"{message.sent:,} {message.dtype} in {from_phase}"
                )
        elif call.kind != "sent":
            return None
        state.at += 1
    return None


def _differences(here: Mapping[int, tuple[str, Collective]]) -> list[str]:
    """The first difference between the calls of one collective's members."""
    leader = min(here)
    phase, call = here[leader]
    for rank in sorted(here):
        other_phase, other = here[rank]
        if (other_phase, other.kind, other.dtype) != (phase, call.kind, call.dtype) or (
            call.kind != "all_to_all" and (other.sent, other.received) != (call.sent, call.received)
        ):
            return [f"rank {leader}, {phase}: {call}; rank {rank}, {other_phase}: {other}"]
    if call.kind != "all_to_all" or any(other.splits is None for _, other in here.values()):
        return []
    positions = {rank: position for position, rank in enumerate(call.ranks)}
    for source in call.ranks:
        for target in call.ranks:
            given = here[source][1].splits[0][positions[target]]  # type: ignore[index]
            taken = here[target][1].splits[1][positions[source]]  # type: ignore[index]
            if given != taken:
                return [
                    f"rank {source}, {here[source][0]}: all_to_all with {len(call.ranks)} ranks of {call.group} sends "
                    f"{given:,} rows to rank {target}, which expects {taken:,} in {here[target][0]}"
                ]
    return []


def _stuck(
    ranks: Mapping[int, _Rank],
    waiting: Mapping[tuple[tuple[int, ...], int], Mapping[int, tuple[str, Collective]]],
    sent: Mapping[tuple[int, int], Sequence[tuple[str, Collective]]],
) -> list[str]:
    """Who waits for whom when no rank can proceed, or the messages that nobody received."""
    found = []
    for (members, _), here in waiting.items():
        absent = [rank for rank in members if rank not in here]
        rank = min(here)
        phase, call = here[rank]
        others = "; ".join(_where(ranks, other) for other in absent[:2])
        if here.keys() and not ranks[rank].is_done:
            found.append(f"rank {rank}, {phase}: waits for ever in {call}; without it: {others}")
    for rank, state in ranks.items():
        if not state.is_done and state.calls[state.at][1].kind == "recv":
            phase, call = state.calls[state.at]
            found.append(f"rank {rank}, {phase}: waits for ever in {call}; {_where(ranks, call.peer)}")
    for (source, target), messages in sent.items():
        if messages and not found:
            phase, call = messages[0]
            found.append(
                f"rank {source}, {phase}: {call._replace(kind='send')} is never received; {_where(ranks, target)}"
            )
    return found


def _where(ranks: Mapping[int, _Rank], rank: int) -> str:
    state = ranks[rank]
    if state.is_done:
        return f"rank {rank} has no further call"
    phase, call = state.calls[state.at]
    return f"rank {rank} is in {phase} at {call._replace(kind='send') if call.kind == 'sent' else call}"

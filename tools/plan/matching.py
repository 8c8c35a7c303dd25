"""Whether the ranks' calls match: every collective has all its members, every send its receive, without a cycle."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tools.plan.collectives import POINT_TO_POINT, Collective

MAX_SHOWN = 8
PhaseCall = tuple[str, Collective]  # a call and its phase


@dataclass(frozen=True)
class Phase:
    """A rank's calls in one phase of a step, in order."""

    name: str
    calls: tuple[Collective, ...]


@dataclass
class _Rank:
    """The state of one rank: its calls with their phases, and the index of the next one."""

    calls: list[PhaseCall]
    at: int = 0
    num_posted: int = 0  # calls up to the end of the last batch of sends and receives that was posted
    counts: dict[tuple[int, ...], int] = field(default_factory=dict)  # collectives of each group so far

    @property
    def is_done(self) -> bool:
        return self.at == len(self.calls)


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
    return (found or _Run(ranks).problems())[:MAX_SHOWN]


class _Run:
    """The ranks making their calls, each as far as it can."""

    def __init__(self, ranks: Mapping[int, _Rank]) -> None:
        self.ranks = ranks
        self.found: list[str] = []
        self.sent: dict[tuple[int, int], deque[PhaseCall]] = defaultdict(deque)  # (source, target) -> messages
        # (members, number of the group's collective) -> rank -> its call
        self.waiting: dict[tuple[tuple[int, ...], int], dict[int, PhaseCall]] = defaultdict(dict)

    def problems(self) -> list[str]:
        """The problems of the whole run, or as many as are shown."""
        while len(self.found) < MAX_SHOWN and any(self._advance(rank) for rank in self.ranks):
            pass
        return self.found or self._stuck()

    def _advance(self, rank: int) -> bool:
        """Make the calls of ``rank`` as far as it can; whether it got further or has posted something."""
        state = self.ranks[rank]
        before = state.at, state.num_posted
        while not state.is_done:
            is_message = state.calls[state.at][1].kind in POINT_TO_POINT
            if not (self._exchange(rank, state) if is_message else self._collective(rank, state)):
                break
        return (state.at, state.num_posted) != before

    def _collective(self, rank: int, state: _Rank) -> bool:
        """Come to a collective; whether the other members have come too, which ends it for all."""
        phase, call = state.calls[state.at]
        key = (call.ranks, state.counts.get(call.ranks, 0))
        here = self.waiting[key]
        here[rank] = (phase, call)
        if len(here) < len(call.ranks):
            return False
        del self.waiting[key]
        self.found += _differences(here)
        for member in call.ranks:
            other = self.ranks[member]
            other.counts[call.ranks] = key[1] + 1
            other.at += 1
        return True

    def _exchange(self, rank: int, state: _Rank) -> bool:
        """Post the batch of sends and receives that begins here, once; pass what has arrived, and return whether that
        is all of the batch.
        """
        end = state.at
        while end < len(state.calls) and state.calls[end][1].kind in POINT_TO_POINT:
            phase, call = state.calls[end]
            if call.kind == "send" and end >= state.num_posted:
                self.sent[rank, call.peer].append((phase, call))
            end += 1
        state.num_posted = end
        for phase, call in state.calls[state.at : end]:
            if call.kind == "recv":
                arrived = self.sent[call.peer, rank]
                if not arrived:
                    return False
                from_phase, message = arrived.popleft()
                if (from_phase, message.sent, message.dtype) != (phase, call.received, call.dtype):
                    self.found.append(
                        f"rank {rank}, {phase}: receives {call.received:,} {call.dtype} from rank {call.peer}, which "
                        f"sends {message.sent:,} {message.dtype} in {from_phase}"
                    )
            state.at += 1
        return True

    def _stuck(self) -> list[str]:
        """Which rank waits for which when no rank can proceed, or a message that is never received."""
        found = []
        for (members, _), here in self.waiting.items():
            absent = [self._where(rank) for rank in members if rank not in here]
            rank = min(here)
            phase, call = here[rank]
            found.append(f"rank {rank}, {phase}: waits for ever in {call}; without it: {'; '.join(absent[:2])}")
        for rank, state in self.ranks.items():
            if not state.is_done and state.calls[state.at][1].kind == "recv":
                phase, call = state.calls[state.at]
                found.append(f"rank {rank}, {phase}: waits for ever in {call}; {self._where(call.peer)}")
        if found:
            return found
        return [
            f"rank {source}, {messages[0][0]}: {messages[0][1]} is never received; {self._where(target)}"
            for (source, target), messages in self.sent.items()
            if messages
        ][:1]

    def _where(self, rank: int) -> str:
        state = self.ranks[rank]
        if state.is_done:
            return f"rank {rank} has no further call"
        phase, call = state.calls[state.at]
        return f"rank {rank} is in {phase} at {call}"


def _differences(here: Mapping[int, PhaseCall]) -> list[str]:
    """The first difference between the calls of one collective's members."""
    leader = min(here)
    phase, call = here[leader]
    for rank in sorted(here):
        other_phase, other = here[rank]
        if (other_phase, other.kind, other.dtype) != (phase, call.kind, call.dtype) or (
            call.kind != "all_to_all" and (other.sent, other.received) != (call.sent, call.received)
        ):
            return [f"rank {leader}, {phase}: {call}; rank {rank}, {other_phase}: {other}"]
    splits = {rank: other.splits for rank, (_, other) in here.items() if other.splits is not None}
    if call.kind != "all_to_all" or len(splits) < len(here):
        return []
    for i, source in enumerate(call.ranks):
        for j, target in enumerate(call.ranks):
            given, taken = splits[source][0][j], splits[target][1][i]
            if given != taken:
                return [
                    f"rank {source}, {here[source][0]}: all_to_all with {len(call.ranks)} ranks of {call.group} sends "
                    f"{given:,} rows to rank {target}, which expects {taken:,} in {here[target][0]}"
                ]
    return []

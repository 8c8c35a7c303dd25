"""The calls of a phase with thousands of micro-batches or steps: some in order, and how much all of them are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tools.plan.collectives import Collective
from tools.plan.devices import DeviceProfile

SHOWN_STEPS = 2  # equal steps of a generation whose calls are matched one after another


@dataclass(frozen=True)
class PhaseCalls:
    """The calls of one rank in a phase.

    samples: parts of the phase in order, each as it was run from its first call to its last; where ranks wait for one
    another, all of them have the same parts · count: calls of the whole phase · link_bytes: bytes of all calls by the
    slowest link of their ranks, one of ``LINKS``.
    """

    phase: str
    samples: tuple[tuple[Collective, ...], ...]
    count: int
    link_bytes: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def of(phase: str, calls: Sequence[Collective], rank: int, device: DeviceProfile, steps: int = 1) -> PhaseCalls:
        """A phase of ``steps`` equal steps that make ``calls`` each."""
        num_bytes = {link: steps * total for link, total in link_bytes(calls, rank, device).items()}
        return PhaseCalls(phase, (tuple(calls),) * min(steps, SHOWN_STEPS), steps * len(calls), num_bytes)


def link_bytes(calls: Iterable[Collective], rank: int, device: DeviceProfile) -> Counter[str]:
    """Bytes of the calls of ``rank`` by the slowest link among the ranks that take part."""
    found = Counter[str]()
    for call in calls:
        others = (rank, call.peer) if call.peer >= 0 else call.ranks
        if len(others) > 1:
            found[device.slowest_link(min(others), max(others))] += call.num_bytes
    return found

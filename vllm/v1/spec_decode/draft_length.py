"""How many drafts a step verifies: as many as give the most tokens a second, by costs that are measured once.

No clock is read here: with the same costs, the same requests get the same drafts on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# A kind of draft begins as if so many had been tried, and so many of them right; what was seen fades into that, so that
# drafts that did not pay are tried again.
_TRIED, _RIGHT = 4.0, 3.0
_KEPT, _STEPS_BETWEEN = 0.97, 16
_WORTH = 1.05  # of the rate without drafts: what costs and chances leave out is not worth less


@dataclass(frozen=True)
class StepCosts:
    """Seconds by n, from 0 on: of a step of n sequences without drafts; of one of n rows of sequences and drafts; what
    n drafts add to a step; and of a pass of the prediction layer over n rows.
    """

    plain: np.ndarray
    verified: np.ndarray
    drafted: np.ndarray
    predicted: np.ndarray

    def of_steps(self, num_sequences: int, drafts: np.ndarray) -> np.ndarray:
        """The seconds of steps of so many sequences, each with another number of drafts."""
        with_drafts = self.plain[num_sequences] + self.drafted[drafts]
        seconds = np.maximum(with_drafts, self.verified[num_sequences + drafts])
        return np.where(drafts > 0, seconds, self.plain[num_sequences])


def interpolated(measured: Mapping[int, float], most: int) -> np.ndarray:
    """Costs of 0 to ``most`` rows from those of some; beyond the largest of them, in proportion to the rows.

    More rows never cost less: what says so was disturbed.
    """
    rows, count = sorted(measured), np.arange(most + 1)
    seconds = np.minimum.accumulate([measured[size] for size in reversed(rows)])[::-1]
    return np.where(count > rows[-1], seconds[-1] * count / rows[-1], np.interp(count, rows, seconds))


def num_worthwhile(num_sequences: int, chances: np.ndarray, costs: StepCosts, least_s: float = 0.0) -> int:
    """How many of the drafts with these chances to be right, the best first, a step of so many sequences verifies.

    ``least_s``: what the step costs in any case, because of the replicas that step together with this one.
    """
    tokens = num_sequences + np.concatenate(([0.0], np.cumsum(chances)))
    seconds = costs.of_steps(num_sequences, np.arange(len(tokens)))
    return _best(tokens / np.maximum(seconds, least_s))


def num_worthwhile_passes(num_sequences: int, chances: Sequence[float], costs: StepCosts) -> int:
    """How many passes the prediction layer makes behind a step of so many sequences, for drafts with these chances."""
    tokens = num_sequences * (1 + np.concatenate(([0.0], np.cumsum(chances))))
    counts = np.arange(len(tokens))
    drafts = np.minimum(num_sequences * counts, len(costs.verified) - 1 - num_sequences)
    first, further = costs.predicted[num_sequences + drafts], costs.predicted[num_sequences]
    passes = np.where(counts > 0, first + np.maximum(counts - 1, 0) * further, 0.0)
    return _best(tokens / (costs.of_steps(num_sequences, drafts) + passes))


def _best(rates: np.ndarray) -> int:
    best = int(np.argmax(rates))
    return best if rates[best] > _WORTH * rates[0] else 0


class Acceptance:
    """How many drafts were right of late, by their kind and their place: the chances of the next ones."""

    def __init__(self, num_kinds: int, most: int) -> None:
        self._tried = [[_TRIED] * most for _ in range(num_kinds)]
        self._right = [[_RIGHT] * most for _ in range(num_kinds)]
        self._chances: list[list[float] | None] = [None] * num_kinds
        self._num_steps = 0
        self.version = 0  # grows when chances change

    def chances(self, kind: int) -> list[float]:
        """The chance of each draft of a sequence that it and all before it are right."""
        found = self._chances[kind]
        if found is None:
            found, chance = [], 1.0
            for tried, right in zip(self._tried[kind], self._right[kind], strict=True):
                chance *= right / tried
                found.append(chance)
            self._chances[kind] = found
        return found

    def note(self, kind: int, num_drafts: int, num_right: int) -> None:
        """A draft of so many tokens was verified; those behind its first wrong one were not tried."""
        tried, right = self._tried[kind], self._right[kind]
        for place in range(min(num_right + 1, num_drafts)):
            tried[place] += 1
            right[place] += place < num_right
        self._chances[kind] = None
        self.version += 1

    def end_step(self) -> None:
        """Let what was seen fade."""
        self._num_steps += 1
        if self._num_steps % _STEPS_BETWEEN == 0:
            for column, start in ((self._tried, _TRIED), (self._right, _RIGHT)):
                for kind in column:
                    kind[:] = [start + _KEPT * (value - start) for value in kind]
            self._chances = [None] * len(self._chances)
            self.version += 1

"""The order in which groups would end if each running sample got one token a step.

It follows from the lengths of samples alone: neither drafts, the number of replicas, a full cache nor a clock change
which groups come first.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heapreplace


class EndOrder:
    """The steps in which groups end by that rule; of unfinished ones, the earliest that is still possible.

    Args:
        num_slots: samples that run at once; they start in the order of (prompt, sample).
        num_samples: of a prompt.
    """

    def __init__(self, num_slots: int, num_samples: int) -> None:
        self._num_slots, self._num_samples = num_slots, num_samples
        self._num_tokens: dict[tuple[int, int], int] = {}
        self._submitted: list[int] = []  # prompt -> the step before which it cannot start
        self._decided: set[int] = set()
        self._now = 0

    def submit(self, count: int) -> None:
        """``count`` more prompts, numbered on, which can start when the last decided group has ended."""
        self._submitted += [self._now] * count

    def note(self, num_tokens: Mapping[tuple[int, int], int]) -> None:
        """The tokens that samples, named (prompt, sample), have by now; of those without a note, none."""
        self._num_tokens.update(num_tokens)

    def undecided(self) -> list[tuple[int, int]]:
        """(step, prompt) of each group that is not decided, the first one first.

        A group that has ended keeps its step, and the others' only grow. So what stands before all unfinished groups
        has its final place.
        """
        slots, ends = [0] * self._num_slots, list[tuple[int, int]]()
        heapify(slots)
        for prompt, submitted in enumerate(self._submitted):
            last = 0
            for sample in range(self._num_samples):
                end = max(slots[0], submitted) + self._num_tokens.get((prompt, sample), 0)
                heapreplace(slots, end)
                last = max(last, end)
            if prompt not in self._decided:
                ends.append((last, prompt))
        return sorted(ends)

    def decide(self, step: int, prompt: int) -> None:
        """The group is the next one; it ended in ``step``."""
        self._decided.add(prompt)
        self._now = step

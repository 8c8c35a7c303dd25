"""The order in which groups would end if each running sample got one token a step.

It follows from the lengths of samples alone: neither drafts, the number of replicas, a full cache nor a clock change
which groups come first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import heapreplace


class EndOrder:
    """The steps in which groups end by that rule; of those that are not final, the earliest that is still possible.

    Args:
        num_slots: samples that run at once; they start in the order of (prompt, sample).
        num_samples: of a prompt.
    """

    def __init__(self, num_slots: int, num_samples: int) -> None:
        self._num_slots, self._num_samples = num_slots, num_samples
        self._num_tokens: dict[tuple[int, int], int] = {}
        self._submitted: list[int] = []  # prompt -> the step before which it cannot start
        self._ended: set[tuple[int, int]] = set()
        self._decided: set[int] = set()
        self._now = 0

    def submit(self, count: int) -> None:
        """``count`` more prompts, numbered on, which can start when the last decided group has ended."""
        self._submitted += [self._now] * count

    def note(self, num_tokens: Mapping[tuple[int, int], int]) -> None:
        """The tokens that samples, named (prompt, sample), have by now; of those without a note, none."""
        self._num_tokens.update(num_tokens)

    def end(self, samples: Iterable[tuple[int, int]]) -> None:
        """These samples have ended; their tokens have been noted."""
        self._ended.update(samples)

    def undecided(self) -> list[tuple[int, int, bool]]:
        """(step, prompt, whether the step is final) of each group that is not decided, the first one first.

        A step that is not final can only grow. So the first group has its place where its step is final, which it is
        when all of its samples have ended, and none of them, nor any before them, takes the slot of one that has not.
        """
        slots, ends = [(0, False)] * self._num_slots, list[tuple[int, int, bool]]()  # (its end, whether that may grow)
        starts_are_final = True
        for prompt, submitted in enumerate(self._submitted):
            last, is_final = 0, True
            for sample in ((prompt, index) for index in range(self._num_samples)):
                free, may_grow = slots[0]
                starts_are_final = starts_are_final and not may_grow
                is_final_end = starts_are_final and sample in self._ended
                end = max(free, submitted) + self._num_tokens.get(sample, 0)
                heapreplace(slots, (end, not is_final_end))
                last, is_final = max(last, end), is_final and is_final_end
            if prompt not in self._decided:
                ends.append((last, prompt, is_final))
        return sorted(ends)

    def decide(self, step: int, prompt: int) -> None:
        """The group is the next one; it ended in ``step``."""
        self._decided.add(prompt)
        self._now = step

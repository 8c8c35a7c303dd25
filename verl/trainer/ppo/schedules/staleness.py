"""Which prompts may be begun, and which finished ones are trained on next, so that no sample gets too old.

Time is counted in weight versions: version v begins with the v-th sync. Between two syncs K steps train on b prompts
each, so K b are trained on at every version. A prompt that was begun at version v must be trained on at version v + S
at the latest. That is possible when, for every j >= 0, at most r + j K b of the prompts that are not trained on yet
must be so by version v + j, where r is what can still be trained on at version v. Beginning no more prompts than
r + threshold K b (threshold <= S) keeps this true, and so does taking the ones begun first; a younger one that has
finished earlier may overtake as long as it stays true. No step ever waits for ever: what is due has been begun.

Pure counting, in Python: no clock and no tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class StalenessLedger:
    """The prompts that have been begun and not been trained on, by number, and what may happen to them next.

    Attributes:
        prompts_per_step: b.
        steps_per_version: K.
        threshold: prompts that may be begun ahead, in units of K b.
        version: of the weights that are trained now.
        steps_left: of this version that have not taken their prompts.
        next_prompt: number of the prompt that is begun next; they are numbered in the order of the data.
        begun: number -> version at which it was begun, of all that have not been taken.
    """

    prompts_per_step: int
    steps_per_version: int
    threshold: float
    version: int = 0
    steps_left: int = field(init=False)
    next_prompt: int = 0
    begun: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.steps_left = self.steps_per_version

    @property
    def max_staleness(self) -> int:
        """S: versions that may lie between the beginning of a prompt and its training."""
        return math.ceil(self.threshold)

    @property
    def num_allowed(self) -> int:
        """Prompts that may be begun now."""
        ahead = math.floor(self.threshold * self.steps_per_version * self.prompts_per_step)
        return max(0, self.steps_left * self.prompts_per_step + ahead - len(self.begun))

    def begin(self, count: int) -> list[int]:
        """Numbers of the next ``count`` prompts, which are begun at this version."""
        assert count <= self.num_allowed, f"{count} prompts begun where {self.num_allowed} are allowed"
        numbers = list(range(self.next_prompt, self.next_prompt + count))
        self.next_prompt += count
        self.begun |= dict.fromkeys(numbers, self.version)
        return numbers

    def begin_version(self, version: int, steps_left: int | None = None) -> None:
        """The weights of ``version`` are in the rollout engines; all of its steps, or ``steps_left``, are to come."""
        assert version >= self.version, f"version {version} after {self.version}"
        self.version = version
        self.steps_left = self.steps_per_version if steps_left is None else steps_left

    def choice(self, finished: Iterable[int]) -> list[int] | None:
        """Those of the ``finished`` prompts that the next step trains on; None when it must wait for more.

        The ones begun first go first. Called behind the last step of a version, it is about the first of the next.
        """
        version, left = self.version, self.steps_left
        if left == 0:
            version, left = version + 1, self.steps_per_version
        ordered = sorted(finished, key=lambda number: (self.begun[number], number))
        chosen = ordered[: self.prompts_per_step]
        if len(chosen) < self.prompts_per_step:
            return None
        rest = [since for number, since in self.begun.items() if number not in set(chosen)]
        return sorted(chosen) if self._are_in_time(rest, version, left - 1) else None

    def _are_in_time(self, begun: list[int], version: int, steps_left: int) -> bool:
        """Whether prompts begun at these versions can all be trained on in time, with so many steps of ``version``."""
        for later in range(self.max_staleness + 1):
            due = sum(since + self.max_staleness <= version + later for since in begun)
            if due > (steps_left + later * self.steps_per_version) * self.prompts_per_step:
                return False
        return True

    def take(self, chosen: list[int]) -> list[int]:
        """The next step trains on ``chosen``; the staleness of each in versions, never above ``max_staleness``."""
        assert self.steps_left > 0, f"all steps of version {self.version} have their prompts"
        self.steps_left -= 1
        ages = [self.version - self.begun.pop(number) for number in chosen]
        assert max(ages) <= self.max_staleness, f"prompts {chosen} are {ages} versions old, over {self.max_staleness}"
        return ages

    def state(self) -> dict[str, Any]:
        """For JSON; ``load_state`` of a ledger with the same numbers goes on with it."""
        return {
            "version": self.version,
            "steps_left": self.steps_left,
            "next_prompt": self.next_prompt,
            "begun": sorted(self.begun.items()),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """ValueError when prompts and steps are fewer, or the bound is lower, than what was begun needs."""
        begun = {int(number): int(since) for number, since in state["begun"]}
        self.version, self.steps_left = state["version"], min(state["steps_left"], self.steps_per_version)
        self.next_prompt, self.begun = state["next_prompt"], begun
        if not self._are_in_time(list(begun.values()), self.version, self.steps_left):
            raise ValueError(
                f"{len(begun)} prompts of the checkpoint, begun since version {min(begun.values())}, cannot all be "
                f"trained on within {self.max_staleness} versions: resume with a higher async_training."
                "staleness_threshold, or with those that it had"
            )

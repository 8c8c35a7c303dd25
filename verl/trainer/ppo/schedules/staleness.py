"""Which prompts may be started, and which finished ones are trained on next, so that no sample gets too old.

Time is counted in weight versions: version v begins with the v-th sync. Between two syncs K steps train on b prompts
each, so K b are trained on at every version. A prompt that was started at version v must be trained on at version v + S
at the latest. That is possible when, for every j >= 0, at most r + j K b of the prompts in flight must be trained on by
version v + j, where r is how many can still be trained on at version v. Starting no more prompts than r + threshold K b
(threshold <= S) keeps this true, and so does taking the oldest ones first; a younger one that has finished earlier may
overtake while it stays true. No step waits for ever, because every prompt that is due has been started.

With a surplus more prompts are started than can be trained on, and before a sync those that are unfinished then, or
would get too old, are dropped. No step has to wait for a prompt that is due.

Pure counting, in Python: no clock and no tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class StalenessLedger:
    """The prompts in flight (started and not trained on) by number, and which may be started or trained on next.

    Attributes:
        prompts_per_step: b.
        steps_per_version: K.
        threshold: prompts that may be started ahead, in units of K b.
        version: the version of the weights that are trained now.
        steps_left: steps of this version that have not taken their prompts.
        surplus: prompts that may be started beyond those that can be trained on, because some are dropped.
        next_prompt: the number of the prompt that is started next; prompts are numbered in the order of the data.
        in_flight: number -> the version at which the prompt was started.
    """

    prompts_per_step: int
    steps_per_version: int
    threshold: float
    surplus: int = 0
    version: int = 0
    steps_left: int = field(init=False)
    next_prompt: int = 0
    in_flight: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.steps_left = self.steps_per_version

    @property
    def max_staleness(self) -> int:
        """S: the number of versions that may lie between the start of a prompt and its training."""
        return math.ceil(self.threshold)

    @property
    def num_allowed(self) -> int:
        ahead = math.floor(self.threshold * self.steps_per_version * self.prompts_per_step)
        return max(0, self.steps_left * self.prompts_per_step + ahead + self.surplus - len(self.in_flight))

    def start(self, count: int) -> list[int]:
        """Starts the next ``count`` prompts at this version and returns their numbers."""
        assert count <= self.num_allowed, f"{count} prompts started where {self.num_allowed} are allowed"
        numbers = list(range(self.next_prompt, self.next_prompt + count))
        self.next_prompt += count
        self.in_flight |= dict.fromkeys(numbers, self.version)
        return numbers

    def begin_version(self, version: int, steps_left: int | None = None) -> None:
        """Starts ``version``, whose weights the engines have; all of its steps, or ``steps_left``, are to come."""
        assert version >= self.version, f"version {version} after {self.version}"
        self.version = version
        self.steps_left = self.steps_per_version if steps_left is None else steps_left

    def choice(self, finished: Iterable[int]) -> list[int] | None:
        """Returns the ``finished`` prompts that the next step trains on; None when it must wait for more.

        Those that were started first come first. After the last step of a version the next step is the first one of the
        next version.
        """
        version, left = self.version, self.steps_left
        if left == 0:
            version, left = version + 1, self.steps_per_version
        ordered = sorted(finished, key=lambda number: (self.in_flight[number], number))
        chosen = ordered[: self.prompts_per_step]
        if len(chosen) < self.prompts_per_step:
            return None
        if self.surplus:
            return sorted(chosen)
        taken = set(chosen)
        rest = [since for number, since in self.in_flight.items() if number not in taken]
        return sorted(chosen) if self._are_in_time(rest, version, left - 1) else None

    def _are_in_time(self, started: list[int], version: int, steps_left: int) -> bool:
        """Whether prompts started at these versions can all be trained on in time from here on."""
        for later in range(self.max_staleness + 1):
            due = sum(since + self.max_staleness <= version + later for since in started)
            if due > (steps_left + later * self.steps_per_version) * self.prompts_per_step:
                return False
        return True

    def take(self, chosen: Sequence[int]) -> list[int]:
        """Removes the prompts that the next step trains on; returns the staleness of each in versions."""
        assert self.steps_left > 0, f"all steps of version {self.version} have their prompts"
        self.steps_left -= 1
        ages = [self.version - self.in_flight.pop(number) for number in chosen]
        assert max(ages) <= self.max_staleness, f"prompts {chosen} are {ages} versions old, over {self.max_staleness}"
        return ages

    def drop(self, numbers: Iterable[int]) -> None:
        """Forgets prompts in flight that are not trained on."""
        for number in numbers:
            del self.in_flight[number]

    def overdue(self, numbers: Iterable[int]) -> list[int]:
        """Those of the prompts ``numbers`` that cannot all be trained on in time, if no others are in flight.

        The ones that were started first are kept first.
        """
        in_time: list[int] = []
        late = []
        for number in sorted(numbers, key=lambda number: (self.in_flight[number], number)):
            since = self.in_flight[number]
            if self._are_in_time([*in_time, since], self.version, self.steps_left):
                in_time.append(since)
            else:
                late.append(number)
        return late

    def state(self) -> dict[str, Any]:
        """The state as JSON values, for ``load_state``."""
        return {
            "version": self.version,
            "steps_left": self.steps_left,
            "next_prompt": self.next_prompt,
            "in_flight": sorted(self.in_flight.items()),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores a state; ValueError when the prompts in flight cannot be in time with this ledger's numbers."""
        in_flight = {int(number): int(since) for number, since in state["in_flight"]}
        self.version, self.steps_left = state["version"], min(state["steps_left"], self.steps_per_version)
        self.next_prompt, self.in_flight = state["next_prompt"], in_flight
        if not self._are_in_time(list(in_flight.values()), self.version, self.steps_left):
            raise ValueError(
                f"{len(in_flight)} prompts of the checkpoint, started since version {min(in_flight.values())}, cannot "
                f"all be trained on within {self.max_staleness} versions: resume with a higher async_training."
                "staleness_threshold, or with those that it had"
            )

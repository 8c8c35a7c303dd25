"""Dynamic sampling of groups that end one by one: each is graded while others are generated, and kept or rejected.

The grades of the groups that ended in a call of the rollout ranks are taken when the next call is over, or when there
is nothing to generate. So which groups are kept follows from the order in which they end, and not from how long a
grader takes. In the synchronous schedule that order follows from the samples' lengths alone (``EndOrder``). When a step
has enough groups, what is unfinished or comes later is aborted, as in slime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from verl.protocol import DataProto
from verl.trainer.ppo.filter_groups import SampleGroup, groups_of, too_few_groups
from verl.trainer.ppo.schedules.end_order import EndOrder
from verl.trainer.ppo.schedules.sample_buffer import Ledger, SampleBuffer
from verl.workers.reward_manager import GradedSample, Scores
from verl.workers.rollout.rollout_messages import PROMPT, SAMPLE


class Pending(Protocol):
    """Scores that are being computed in other processes (``PendingScores``, ``PendingRewards``)."""

    def is_done(self) -> bool: ...

    def result(self) -> Scores: ...


@dataclass(frozen=True)
class Grading:
    """How groups are graded and filtered.

    Attributes:
        start: begins to grade a batch, in other processes.
        add: adds the scores to their batch as columns.
        record: writes grades down for the step's ledger.
        keeps: whether a graded group is trained on.
        end_step: called when the counts of a step are taken.
    """

    start: Callable[[DataProto], Pending]
    add: Callable[[DataProto, Scores], None]
    record: Callable[[Sequence[GradedSample]], None]
    keeps: Callable[[SampleGroup], bool]
    end_step: Callable[[], None] = lambda: None

    def score(self, batch: DataProto) -> None:
        """Grades a batch at once and waits for it."""
        scores = self.start(batch).result()
        self.record(scores.samples)
        self.add(batch, scores)


@dataclass
class StepLedger:
    """The prompts of one step of the synchronous schedule, with the interface of ``StalenessLedger``.

    Attributes:
        prompts_per_step: prompts that the step trains on.
        num_submitted: prompts that may be started, numbered from 0.
        next_prompt: the number of the prompt that is started next.
    """

    prompts_per_step: int
    num_submitted: int = 0
    next_prompt: int = 0

    @property
    def num_allowed(self) -> int:
        return self.num_submitted - self.next_prompt

    def start(self, count: int) -> list[int]:
        self.next_prompt += count
        return list(range(self.next_prompt - count, self.next_prompt))

    def choice(self, finished: Sequence[int]) -> list[int] | None:
        """The first groups that were kept, in the order of their prompts; None while there are too few."""
        return sorted(finished[: self.prompts_per_step]) if len(finished) >= self.prompts_per_step else None

    def take(self, chosen: Sequence[int]) -> list[int]:
        return [0] * len(chosen)

    def drop(self, numbers: Sequence[int]) -> None:
        """Nothing is to be done: a dropped prompt's number is not used again."""

    def overdue(self, numbers: Sequence[int]) -> list[int]:
        """All: no later step trains on them."""
        return list(numbers)


@dataclass
class FilterCounts:
    """What became of the groups since the last step took its own."""

    num_graded: int = 0
    num_kept: int = 0
    num_aborted: int = 0
    reward_sum: float = 0.0
    num_samples: int = 0

    def metrics(self) -> dict[str, float]:
        """The share is 1 and the mean reward 0 where no group was graded for this step."""
        return {
            "train/kept_groups_ratio": self.num_kept / self.num_graded if self.num_graded else 1.0,
            "train/reward_before_filter": self.reward_sum / max(self.num_samples, 1),
            "train/aborted_groups": float(self.num_aborted),
        }


@dataclass(frozen=True)
class GradedGroup:
    rows: DataProto  # scored
    samples: list[GradedSample]


class GroupBuffer(SampleBuffer):
    """A sample buffer whose groups are graded as they end; only kept ones count as finished.

    Args:
        max_groups: ValueError when so many groups have been graded for a step and too few of them kept; 0 = no limit.
        order: of groups, in which they are kept or rejected until a step has enough; None: as they end.

    Attributes:
        counts: of the groups since the last ``take``.
    """

    def __init__(
        self,
        ledger: Ledger,
        rows_of: Callable[[int], DataProto],
        num_replicas: int,
        max_num_seqs: int,
        grading: Grading,
        *,
        drops_unfinished: bool,
        max_groups: int = 0,
        order: EndOrder | None = None,
    ) -> None:
        super().__init__(ledger, rows_of, num_replicas, max_num_seqs)
        self.drops_unfinished = drops_unfinished
        self.counts = FilterCounts()
        self._grading, self._max_groups, self._order = grading, max_groups, order
        self._pending: list[tuple[int, DataProto, Pending]] = []
        self._graded: dict[int, GradedGroup] = {}  # by number, and neither kept nor rejected
        self._kept: dict[int, GradedGroup] = {}  # by number, in the order in which they ended

    @property
    def finished(self) -> list[int]:
        """Numbers of the prompts that have been kept, in the order in which their groups ended."""
        return list(self._kept)

    @property
    def lacks_prompts(self) -> bool:
        """Whether neither those that have been kept nor those that are to end are enough for a step."""
        return len(self.prompts) + self.ledger.num_allowed < self.ledger.prompts_per_step

    @property
    def is_settled(self) -> bool:
        return all(scores.is_done() for _, _, scores in self._pending)

    @property
    def can_go_on(self) -> bool:
        return bool(self._pending) or super().can_go_on

    def note(self, num_tokens: Mapping[tuple[int, int], int]) -> None:
        if self._order is not None:
            self._order.note(num_tokens)

    def add(self, replica: int, rows: DataProto) -> None:
        """Begins to grade the groups whose last sample is among ``rows``."""
        super().add(replica, rows)
        if self._order is not None:
            columns = (rows.non_tensor_batch.get(name, ()) for name in (PROMPT, SAMPLE))
            self._order.end((int(number), int(sample)) for number, sample in zip(*columns, strict=True))
        for number in self.numbers_in(rows):
            prompt = self.prompts[number]
            if not prompt.num_unfinished:
                group = self.gather([prompt])
                self._pending.append((number, group, self._grading.start(group)))

    def settle(self) -> bool:
        """Takes the grades of all groups that have ended, waiting for them; False when there were none."""
        has_settled = self._take_grades()
        num_kept, num_graded, wanted = len(self._kept), self.counts.num_graded, self.ledger.prompts_per_step
        if self._max_groups and num_graded >= self._max_groups and num_kept < wanted:
            raise ValueError(too_few_groups(num_kept, wanted, num_graded))
        return has_settled

    def _take_grades(self) -> bool:
        pending, self._pending = self._pending, []
        for number, rows, scoring in pending:
            scores = scoring.result()
            self._grading.add(rows, scores)
            self._graded[number] = GradedGroup(rows, scores.samples)
        counts = self.counts
        for number in self._next_graded():
            graded = self._graded.pop(number)
            group = groups_of(graded.rows)[0][0]
            counts.num_graded, counts.num_samples = counts.num_graded + 1, counts.num_samples + len(graded.rows)
            counts.reward_sum += float(group.rewards.sum())
            if self._grading.keeps(group):
                counts.num_kept += 1
                self._kept[number] = graded
            else:
                self._grading.record(graded.samples)
                self._drop([number])
        return bool(pending)

    def _next_graded(self) -> Iterator[int]:
        """The graded groups whose place is known, in their order; with one, until it is known how the step goes on."""
        if self._order is None:
            yield from list(self._graded)
            return
        for step, number, is_final in self._order.undecided():
            if not is_final or number not in self._graded or self.is_next_step_ready or self.lacks_prompts:
                return
            self._order.decide(step, number)
            yield number

    def take(self, chosen: list[int]) -> DataProto:
        self.ledger.take(chosen)
        prompts = [self.prompts.pop(number) for number in chosen]
        groups = [self._kept.pop(number) for number in chosen]
        self.hold(prompts)
        for group in groups:
            self._grading.record(group.samples)
        return DataProto.concat([group.rows for group in groups])

    def take_counts(self) -> FilterCounts:
        """The counts, which begin anew."""
        self._grading.end_step()
        counts, self.counts = self.counts, FilterCounts()
        return counts

    def drop_unneeded(self) -> bool:
        """Drops what is unfinished, and kept groups that would get too old; whether the engines must abort samples.

        Before a weight sync, when the next step has its groups.
        """
        self.settle()
        unfinished = [number for number, prompt in self.prompts.items() if prompt.num_unfinished]
        self._drop(unfinished)
        self.drop_overdue()
        self.counts.num_aborted += len(unfinished)
        return bool(unfinished)

    def drop_overdue(self) -> None:
        """Drops kept groups that no step can train on in time."""
        overdue = self.ledger.overdue(self.finished)
        for number in overdue:
            self._grading.record(self._kept.pop(number).samples)
        self._drop(overdue)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the prompts in flight; no group may wait for its grade."""
        assert not self._pending, "settle comes first"
        return {"kept": list(self._kept), "counts": vars(self.counts)}

    def load_state(self, state: dict[str, Any]) -> None:
        """After the finished samples have been added: grades the kept groups again, in their order.

        ``state`` is empty in a checkpoint of a run without a filter, whose groups are filtered now.
        """
        order = {number: index for index, number in enumerate(state.get("kept", ()))}
        self._pending.sort(key=lambda entry: order.get(entry[0], len(order)))
        self._take_grades()
        self.counts = FilterCounts(**state.get("counts", {}))

    def _drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            del self.prompts[number]
        self.ledger.drop(numbers)

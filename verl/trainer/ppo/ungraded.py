"""A run whose reward function fails does not train: the limit on samples without a grade."""

from __future__ import annotations

from collections.abc import Sequence

from verl.workers.reward_manager import GradedSample


class UngradedLimit:
    """Counts the samples without a grade among those of a step, however many batches they come in.

    Args:
        max_ratio: ``reward_model.max_ungraded_ratio``.
        samples_per_step: samples that are looked at together; a filter of groups grades any number for a step.
    """

    def __init__(self, max_ratio: float, samples_per_step: int) -> None:
        self._max_ratio, self._samples_per_step = max_ratio, samples_per_step
        self._seen: list[GradedSample] = []

    def add(self, samples: Sequence[GradedSample]) -> None:
        """ValueError when all samples of a step, or more than ``max_ratio`` of them, have no grade."""
        self._seen += samples
        if len(self._seen) >= self._samples_per_step:
            seen, self._seen = self._seen, []
            self.check(seen, "a step")

    def check(self, samples: Sequence[GradedSample], where: str) -> None:
        """As ``add``, of these samples alone; ``where`` is what they are of."""
        failed = [sample for sample in samples if not sample.result.is_graded]
        if not failed or (len(failed) < len(samples) and len(failed) <= self._max_ratio * len(samples)):
            return
        first = failed[0]
        function = first.result.function
        grader = "" if function is None else f" in {function.name} of {function.path}"
        limit = "are the most" if self._max_ratio < 1 else "and fewer than all are the most"
        raise ValueError(
            f"{len(failed)} of {len(samples)} samples of {where} have no grade; {self._max_ratio:.0%} {limit} "
            f"(reward_model.max_ungraded_ratio). The first, of data source {first.job.data_source!r}, failed{grader}: "
            f"{first.result.status}: {first.result.error}. Mend the function, or raise reward_model.timeout_s where "
            "the calls take too long, and start the run again: it continues from its last checkpoint"
        )

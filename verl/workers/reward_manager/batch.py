"""The manager that gives a whole batch to one call of a batched reward function, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.protocol import DataProto
from verl.utils.reward_score.event_loop import finished
from verl.workers.reward_manager.abstract import RawRewardFn
from verl.workers.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.registry import register
from verl.workers.reward_manager.samples import GradingSample, grading_samples


@register("batch")
class BatchRewardManager(NaiveRewardManager):
    """Calls ``compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs)`` once for a batch."""

    adds_acc = True

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: RawRewardFn,
        reward_fn_key: str = "data_source",
        **reward_kwargs: Any,
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key)
        self.reward_kwargs = reward_kwargs

    def verify(self, data: DataProto) -> list[Any]:
        """What the function returns for each row: a number, or a dict with ``score``."""
        return self._grade(grading_samples(data, self.tokenizer, self.reward_fn_key))

    def _grade(self, samples: Sequence[GradingSample]) -> list[Any]:
        results = self.compute_score(
            data_sources=[sample.data_source for sample in samples],
            solution_strs=[sample.solution_str for sample in samples],
            ground_truths=[sample.ground_truth for sample in samples],
            extra_infos=[sample.extra_info for sample in samples],
            **self.reward_kwargs,
        )
        return list(finished(results))

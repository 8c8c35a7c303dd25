"""The manager that grades one response after the other, in this process."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from verl.protocol import DataProto
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager.abstract import AbstractRewardManager, RawRewardFn
from verl.workers.reward_manager.registry import register
from verl.workers.reward_manager.samples import (
    extra_info_of,
    grade,
    grading_samples,
    log_examples,
    reported,
    rewards_on_last_tokens,
    score_of,
    scores_of_a_model,
)


@register("naive")
class NaiveRewardManager(AbstractRewardManager):
    """Puts each response's score on its last token.

    A run with ``reward_model.reward_manager=naive`` grades in processes instead (``PooledRewardManager``).
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: RawRewardFn | None = None,
        reward_fn_key: str = "data_source",
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score or default_compute_score
        self.reward_fn_key = reward_fn_key

    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        given = scores_of_a_model(data, return_dict=return_dict)
        if given is not None:
            return given
        samples = grading_samples(data, self.tokenizer, self.reward_fn_key)
        results = [grade(self.compute_score, sample) for sample in samples]
        log_examples(samples, results, self.num_examine)
        rewards = rewards_on_last_tokens([score_of(result) for result in results], samples, data)
        return reported(rewards, extra_info_of(results), return_dict=return_dict)

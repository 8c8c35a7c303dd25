"""The manager that gives a whole batch to one call of a batched reward function, in this process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.utils.reward_score.event_loop import finished
from verl.workers.reward_manager.abstract import AbstractRewardManager, RawRewardFn
from verl.workers.reward_manager.registry import register
from verl.workers.reward_manager.samples import (
    extra_info_of,
    grading_samples,
    log_examples,
    reported,
    rewards_on_last_tokens,
    score_of,
    scores_of_a_model,
)


@register("batch")
class BatchRewardManager(AbstractRewardManager):
    """Calls ``compute_score(data_sources, solution_strs, ground_truths, extra_infos, **reward_kwargs)`` once a batch.

    A run with ``reward_model.reward_manager=batch`` grades in processes instead (``PooledRewardManager``).
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: RawRewardFn,
        reward_fn_key: str = "data_source",
        **reward_kwargs: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score
        self.reward_fn_key = reward_fn_key
        self.reward_kwargs = reward_kwargs

    def verify(self, data: DataProto) -> list[Any]:
        """What the function returns for each row: a number, or a dict with ``score``."""
        samples = grading_samples(data, self.tokenizer, self.reward_fn_key)
        results = self.compute_score(
            data_sources=[sample.data_source for sample in samples],
            solution_strs=[sample.solution_str for sample in samples],
            ground_truths=[sample.ground_truth for sample in samples],
            extra_infos=[sample.extra_info for sample in samples],
            **self.reward_kwargs,
        )
        return list(finished(results))

    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        given = scores_of_a_model(data, return_dict=return_dict)
        if given is not None:
            return given
        samples, results = grading_samples(data, self.tokenizer, self.reward_fn_key), self.verify(data)
        log_examples(samples, results, self.num_examine)
        scores = [score_of(result) for result in results]
        data.batch["acc"] = torch.tensor(scores, dtype=torch.float32)
        rewards = rewards_on_last_tokens(scores, samples, data)
        return reported(rewards, extra_info_of(results), return_dict=return_dict)

"""The manager that grades responses side by side and gives 0 to one whose grader fails."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.workers.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.registry import register
from verl.workers.reward_manager.samples import (
    GradingSample,
    grade,
    grading_samples,
    reported,
    rewards_on_last_tokens,
    score_of,
    scores_of_a_model,
)

logger = logging.getLogger(__name__)

_NUM_THREADS = 16


@register("prime")
class PrimeRewardManager(NaiveRewardManager):
    """Grades in threads, which suits functions that wait for something, a server or a program.

    A run with ``reward_model.reward_manager=prime`` grades in processes instead (``PooledRewardManager``).
    """

    def verify(self, data: DataProto) -> list[float]:
        """The score of each row, 0 where its function raised; also the column ``acc`` of ``data``, float32 [B]."""
        return self._verify(grading_samples(data, self.tokenizer, self.reward_fn_key), data)

    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        given = scores_of_a_model(data, return_dict=return_dict)
        if given is not None:
            return given
        samples = grading_samples(data, self.tokenizer, self.reward_fn_key)
        rewards = rewards_on_last_tokens(self._verify(samples, data), samples, data)
        return reported(rewards, {}, return_dict=return_dict)

    def _verify(self, samples: list[GradingSample], data: DataProto) -> list[float]:
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            scores = list(threads.map(self._score, samples))
        data.batch["acc"] = torch.tensor(scores, dtype=torch.float32)
        return scores

    def _score(self, sample: GradingSample) -> float:
        try:
            return score_of(grade(self.compute_score, sample))
        except Exception as error:  # a process edge: one answer that cannot be graded scores 0
            logger.warning("ungraded: %s: %s: %.120r", type(error).__name__, error, sample.solution_str)
            return 0.0

"""The manager that grades responses side by side and gives 0 to one whose grader fails."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from verl.protocol import DataProto
from verl.workers.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.registry import register
from verl.workers.reward_manager.samples import GradingSample, grade, grading_samples, score_of

logger = logging.getLogger(__name__)

_NUM_THREADS = 16


@register("prime")
class PrimeRewardManager(NaiveRewardManager):
    """Grades in threads, which suits functions that wait for something, a server or a program."""

    adds_acc = True

    def verify(self, data: DataProto) -> list[float]:
        """The score of each row, 0 where its function raised; also the column ``acc`` of ``data``, float32 [B]."""
        scores = self._grade(grading_samples(data, self.tokenizer, self.reward_fn_key))
        data.batch["acc"] = torch.tensor(scores, dtype=torch.float32)
        return scores

    def _grade(self, samples: Sequence[GradingSample]) -> list[float]:
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            return list(threads.map(self._score, samples))

    def _score(self, sample: GradingSample) -> float:
        try:
            return score_of(grade(self.compute_score, sample))
        except Exception as error:  # a process edge: one answer that cannot be graded scores 0
            logger.warning("ungraded: %s: %s: %.120r", type(error).__name__, error, sample.solution_str)
            return 0.0

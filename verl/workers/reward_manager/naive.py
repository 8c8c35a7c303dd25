"""Every response graded on its own by a rule."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.utils.reward_score.scoring_pool import ScoringJob, ScoringPool, ScoringResult
from verl.workers.config import CustomRewardFunctionConfig, RewardModelConfig
from verl.workers.reward_manager.registry import register

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Scores:
    """Rewards of a batch of B responses.

    Attributes:
        token_level_scores: fp32 [B, R], a response's score on its last token.
        parts: every component by name, float [B] each; ``ungraded`` is 1 where the grader gave up.
        responses: decoded text.
    """

    token_level_scores: Tensor
    parts: dict[str, np.ndarray]
    responses: list[str]


class PendingScores:
    """Scores that are being computed in other processes."""

    def __init__(self, futures: list[Future[ScoringResult]], response_mask: Tensor, responses: list[str]) -> None:
        self._futures = futures
        self._response_mask = response_mask
        self._responses = responses

    def result(self) -> Scores:
        """Waits for every answer; each has its own time limit, so this ends."""
        results = [future.result() for future in self._futures]
        names = sorted({name for result in results for name in result.parts})
        parts = {name: np.array([result.parts.get(name, 0.0) for result in results]) for name in names}
        parts["ungraded"] = np.array([float(not result.is_graded) for result in results])
        lengths = self._response_mask.sum(-1)
        scores = torch.zeros(self._response_mask.shape, dtype=torch.float32)
        rows = torch.arange(len(results))
        scores[rows, (lengths - 1).clamp(min=0)] = torch.tensor(parts["score"], dtype=torch.float32)
        return Scores(scores, parts, self._responses)


@register("naive")
class NaiveRewardManager:
    """Decodes responses and hands them to a pool of graders.

    Args:
        function: file and name of the reward function.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, config: RewardModelConfig, function: CustomRewardFunctionConfig
    ) -> None:
        self.tokenizer = tokenizer
        if function.path is None:
            raise ValueError("custom_reward_function.path is empty; give the Python file of a reward function")
        self._pool = ScoringPool(
            function.path,
            function.name,
            kwargs=dict(function.reward_kwargs),
            num_workers=config.num_workers,
            timeout_s=config.timeout_s,
        )

    def start(self, batch: DataProto) -> PendingScores:
        """Begins to score ``batch`` (responses, response_mask; data_source, reward_model, extra_info) and returns."""
        mask = batch.batch["response_mask"]
        tokens = [
            row[: int(length)].tolist() for row, length in zip(batch.batch["responses"], mask.sum(-1), strict=True)
        ]
        responses = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        columns = batch.non_tensor_batch
        jobs = [
            ScoringJob(str(source), text, str(model["ground_truth"]), _as_json(extra))
            for source, text, model, extra in zip(
                columns["data_source"], responses, columns["reward_model"], columns["extra_info"], strict=True
            )
        ]
        return PendingScores(self._pool.submit(jobs), mask, responses)

    def close(self) -> None:
        """Ends the graders."""
        self._pool.close()


def _as_json(extra: Any) -> dict[str, Any]:
    return {
        key: value for key, value in (extra or {}).items() if isinstance(value, (str, int, float, bool, type(None)))
    }

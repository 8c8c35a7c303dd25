"""Grade every response with the reward function of its data source, in separate processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from verl.protocol_storage import as_json
from verl.utils.masks import response_lengths
from verl.utils.reward_score.scoring_pool import ScoringJob, ScoringPool, ScoringResult
from verl.utils.tokenizer import texts_to_grade
from verl.workers.config import CustomRewardFunctionConfig, RewardModelConfig
from verl.workers.rollout.rollout_messages import TURNS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.protocol import DataProto


@dataclass(frozen=True)
class GradedSample:
    """One response and its grade, which make a line of the ledger."""

    uid: str
    prompt: str
    job: ScoringJob
    result: ScoringResult


@dataclass(frozen=True)
class Scores:
    """Rewards of a batch of B responses.

    Attributes:
        token_level_scores: fp32 [B, R], a response's score on its last token.
        parts: every component by name, float [B] each; NaN where a response's function has no such part. ``timeout``
            and ``grader_error`` are 1 where the grader gave up, ``ungraded`` where it did for either reason.
        samples: the graded samples, in the batch's order.
    """

    token_level_scores: Tensor
    parts: dict[str, np.ndarray]
    samples: list[GradedSample]

    @property
    def responses(self) -> list[str]:
        return [sample.job.solution_str for sample in self.samples]


@dataclass(frozen=True)
class PendingScores:
    """Scores that are being computed in other processes.

    Attributes:
        rows: uid, prompt and job of each response.
        turns: ``Trajectory.record`` of each, with samples of several turns.
        gives_acc: a score is also the part ``acc``, where the reward function has no such part.
    """

    futures: list[Future[ScoringResult]]
    response_mask: Tensor
    rows: list[tuple[str, str, ScoringJob]]
    gives_acc: bool = False
    turns: np.ndarray | None = None

    def is_done(self) -> bool:
        """Whether ``result`` would not wait."""
        return all(future.done() for future in self.futures)

    def result(self) -> Scores:
        """Waits for every answer; each has its own time limit, so this ends."""
        results = [future.result() for future in self.futures]
        parts = graded_parts(results)
        if self.gives_acc:
            parts["acc"] = np.where(np.isnan(parts.get("acc", np.nan)), parts["score"], parts.get("acc", np.nan))
        lengths = response_lengths(self.response_mask)
        scores = torch.zeros(self.response_mask.shape, dtype=torch.float32)
        scores[torch.arange(len(results)), (lengths - 1).clamp(min=0)] = torch.tensor(
            parts["score"], dtype=torch.float32
        )
        samples = [GradedSample(*row, result) for row, result in zip(self.rows, results, strict=True)]
        return with_environment_rewards(Scores(scores, parts, samples), self.turns)


class PooledRewardManager:
    """Decodes responses and hands them to a pool of graders.

    A run uses it for ``reward_model.reward_manager`` naive, batch, prime and dapo: a function says by its parameters
    whether it takes samples one by one or in batches, and every function runs in processes that can be killed.

    Args:
        function: files and names of the reward functions.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, config: RewardModelConfig, function: CustomRewardFunctionConfig
    ) -> None:
        self.tokenizer = tokenizer
        self._gives_acc = config.reward_manager == "dapo"
        self._pool = ScoringPool(
            function.default,
            by_source=function.sources,
            num_workers=config.num_workers,
            timeout_s=config.timeout_s,
            batch_size=config.batch_size,
            max_concurrent=config.max_concurrent,
            memory_limit_mb=config.memory_limit_mb,
        )

    def start(self, batch: DataProto, *, is_validation: bool = False) -> PendingScores:
        """Begins to score ``batch`` (responses, response_mask; data_source, reward_model, extra_info) and returns."""
        mask = batch.batch["response_mask"]
        tokens = [
            row[: int(length)].tolist()
            for row, length in zip(batch.batch["responses"], response_lengths(mask), strict=True)
        ]
        responses = texts_to_grade(self.tokenizer, tokens)
        rows = list(grading_jobs(batch, responses))
        futures = self._pool.submit([job for _, _, job in rows])
        return PendingScores(futures, mask, rows, self._gives_acc, batch.non_tensor_batch.get(TURNS))

    def close(self) -> None:
        self._pool.close()


def with_environment_rewards(scores: Scores, turns: np.ndarray | None) -> Scores:
    """Scores with the rewards of environments, on the last tokens of the turns that they are for."""
    if turns is None:
        return scores
    tokens, totals = scores.token_level_scores.clone(), np.zeros(len(turns))
    for row, record in enumerate(turns):
        for position, reward in record["rewards"]:
            tokens[row, position] += reward
            totals[row] += reward
    parts = scores.parts | {"score": scores.parts["score"] + totals, "environment_reward": totals}
    return replace(scores, token_level_scores=tokens, parts=parts)


def grading_jobs(batch: DataProto, responses: list[str]) -> Iterator[tuple[str, str, ScoringJob]]:
    """The uid of each row (its index if prompts have none), its prompt as text, and its job."""
    columns = batch.non_tensor_batch
    for row, response in enumerate(responses):
        of_turns = _of_turns(columns[TURNS][row]) if TURNS in columns else {}
        job = ScoringJob(
            str(columns["data_source"][row]),
            response,
            as_json(columns["reward_model"][row]["ground_truth"]),
            as_json({**(columns["extra_info"][row] or {}), **of_turns}),
        )
        uid = str(columns["uid"][row]) if "uid" in columns else str(row)
        yield uid, str(columns["prompt_text"][row]) if "prompt_text" in columns else "", job


def _of_turns(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a reward function is told of a sample's turns, in ``extra_info``."""
    rewards = [reward for _, reward in record["rewards"]]
    return {"num_turns": record["num_turns"], "rollout_reward_scores": rewards, **record["info"]}


def graded_parts(results: list[ScoringResult]) -> dict[str, np.ndarray]:
    """Columns of all parts; an ungraded answer has 0 in each, like its score."""
    parts = {
        name: np.array([result.parts.get(name, np.nan if result.is_graded else 0.0) for result in results])
        for name in sorted({name for result in results for name in result.parts})
    }
    parts["ungraded"] = np.array([float(not result.is_graded) for result in results])
    parts["timeout"] = np.array([float(result.status == "timeout") for result in results])
    parts["grader_error"] = np.array([float(result.status == "error") for result in results])
    return parts

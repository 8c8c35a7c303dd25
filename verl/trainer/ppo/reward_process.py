"""A user's reward manager in a Ray process of its own, and the batch that it is called with."""

from __future__ import annotations

import hashlib
import inspect
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor

from verl.protocol import DataProto
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.ppo.reward import compute_reward, load_reward_manager, reward_manager_class
from verl.utils.import_utils import import_external_libs
from verl.utils.masks import response_lengths
from verl.utils.reward_score.functions import RewardFunctionSpec
from verl.utils.reward_score.scoring_pool import ScoringJob, ScoringResult
from verl.utils.tokenizer import hf_tokenizer, texts_to_grade
from verl.workers.config import RewardModelConfig
from verl.workers.reward_manager import GradedSample, PooledRewardManager, Scores
from verl.workers.reward_manager.pooled import graded_parts, grading_jobs, with_environment_rewards
from verl.workers.reward_manager.sample_wise import GRADER_ERROR
from verl.workers.rollout.rollout_messages import TURNS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def make_reward_fn(
    config: PPOTrainerConfig, tokenizer: PreTrainedTokenizerBase
) -> PooledRewardManager | RegisteredRewardManager:
    """The scorer of a run, with ``start(batch, is_validation=)`` and ``close()``; Ray must be there.

    A user's manager has a process of its own, so that it can neither hang nor crash the driver.
    """
    if config.reward_model.is_pooled:
        return PooledRewardManager(tokenizer, config.reward_model, config.custom_reward_function)
    return RegisteredRewardManager(tokenizer, config)


class RegisteredRewardManager:
    """Scores batches with the class that ``reward_model`` names, on the driver's node.

    The class is made twice: for training with ``num_examine=0``, for validation with 1.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: PPOTrainerConfig) -> None:
        self._tokenizer, self._config = tokenizer, config
        node = ray.get_runtime_context().get_node_id()
        process = ray.remote(_ManagerProcess)
        self._process: Any = process.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(config, os.getcwd())

    def start(self, batch: DataProto, *, is_validation: bool = False) -> PendingRewards:
        """Begins to score ``batch`` as ``PooledRewardManager.start`` does, and returns."""
        rows = zip(*_responses_and_lengths(batch), strict=True)
        responses = texts_to_grade(self._tokenizer, [row[: int(length)].tolist() for row, length in rows])
        data = manager_batch(batch, self._tokenizer)
        return PendingRewards(
            self._process.score.remote(data, is_validation),
            self._config,
            list(grading_jobs(batch, responses)),
            tuple(batch.batch["responses"].shape),
            time.monotonic(),
            batch.non_tensor_batch.get(TURNS),
        )

    def close(self) -> None:
        ray.kill(self._process)


@dataclass(frozen=True)
class PendingRewards:
    """Rewards that a manager's process computes; as ``PendingScores``."""

    answer: Any
    config: PPOTrainerConfig
    rows: list[tuple[str, str, ScoringJob]]
    shape: tuple[int, int]
    started: float
    turns: np.ndarray | None = None

    def is_done(self) -> bool:
        """Whether ``result`` would not wait."""
        return bool(ray.wait([self.answer], timeout=0)[0])

    def result(self) -> Scores:
        """Waits for the manager, at most ``reward_model.manager_timeout_s``.

        Raises:
            ValueError: the manager raised, took too long, or returned something else than rewards.
        """
        reward, limit = self.config.reward_model, self.config.reward_model.manager_timeout_s
        where = f"the reward manager {reward.manager_class or reward.reward_manager!r}"
        try:
            rewards, extra = ray.get(self.answer, timeout=limit)
        except ray.exceptions.GetTimeoutError as error:
            raise ValueError(
                f"{where} took more than {limit:g} s for {len(self.rows)} samples; make it faster or raise "
                "reward_model.manager_timeout_s"
            ) from error
        except ray.exceptions.RayTaskError as error:
            raise ValueError(f"{where} failed on {len(self.rows)} samples:\n{error}") from error
        except ray.exceptions.RayActorError as error:
            raise ValueError(f"the process of {where} ended: {error}") from error
        problem = reward_problem(rewards, extra, self.shape)
        if problem:
            raise ValueError(f"{where} returned {problem}")
        return with_environment_rewards(self._scores(rewards.float(), extra), self.turns)

    def _scores(self, rewards: Tensor, extra: dict[str, Any]) -> Scores:
        seconds = time.monotonic() - self.started
        grader, version = manager_version(self.config.reward_model)
        totals = rewards.sum(-1).tolist()
        errors = extra.pop(GRADER_ERROR, [None] * len(self.rows))
        samples = []
        for index, row in enumerate(self.rows):
            status = ("error", str(errors[index])) if errors[index] else ("ok", "")
            numbers, texts = {"score": totals[index]}, {}
            for key, values in extra.items():
                value = values[index]
                if isinstance(value, (bool, int, float, np.generic)) and not isinstance(value, np.str_):
                    numbers[key] = float(value)
                else:
                    texts[key] = None if value is None else str(value)
            result = ScoringResult(numbers, *status, texts, seconds, grader, version)
            samples.append(GradedSample(*row, result))
        return Scores(rewards, graded_parts([sample.result for sample in samples]), samples)


def manager_batch(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> DataProto:
    """``batch`` as managers know it: ``prompts``, ``responses``, ``attention_mask``, ``position_ids``, ``input_ids``.

    Prompts are padded on the left to the longest; their tokens are those of ``prompt_text``.
    """
    texts: dict[str, list[int]] = {}
    for text in batch.non_tensor_batch["prompt_text"]:
        if text not in texts:
            texts[text] = tokenizer(text, add_special_tokens=False)["input_ids"]
    prompts = [texts[text] for text in batch.non_tensor_batch["prompt_text"]]
    width, pad = max(map(len, prompts)), int(tokenizer.pad_token_id)
    prompt_ids = torch.tensor([[pad] * (width - len(ids)) + ids for ids in prompts])
    prompt_mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    responses, response_mask = batch.batch["responses"], batch.batch["response_mask"].long()
    is_response = torch.arange(response_mask.shape[-1]) < response_lengths(response_mask)[:, None]
    mask = torch.cat([prompt_mask, is_response.long()], dim=-1)
    tensors = {
        "prompts": prompt_ids,
        "responses": responses,
        "response_mask": response_mask,
        "input_ids": torch.cat([prompt_ids, responses], dim=-1),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
    }
    return DataProto.from_dict(tensors, dict(batch.non_tensor_batch), meta_info=dict(batch.meta_info))


def reward_problem(rewards: Any, extra: Mapping[str, Any], shape: tuple[int, int]) -> str | None:
    """What is wrong with a manager's answer, as the end of a sentence."""
    if not isinstance(rewards, Tensor) or tuple(rewards.shape) != tuple(shape):
        given = tuple(rewards.shape) if isinstance(rewards, Tensor) else type(rewards).__name__
        return f"{given}; expected a tensor {tuple(shape)}, a reward for each token"
    if not bool(torch.isfinite(rewards).all()):
        return f"rewards that are not finite, in {int((~torch.isfinite(rewards)).any(-1).sum())} samples"
    for key, values in extra.items():
        if len(values) != shape[0]:
            return f"{len(values)} values of {key!r} in reward_extra_info; expected one for each of {shape[0]} samples"
        numbers = [v for v in values if isinstance(v, (int, float, np.number))]
        if not all(math.isfinite(v) for v in numbers):
            return f"values of {key!r} in reward_extra_info that are not finite"
    return None


def manager_version(config: RewardModelConfig) -> tuple[RewardFunctionSpec, str]:
    """The file and the name of a manager's class, and the first 16 digits of the SHA-256 of the file."""
    manager_class = reward_manager_class(config)
    path = Path(inspect.getfile(manager_class))
    return RewardFunctionSpec(str(path), manager_class.__name__), hashlib.sha256(path.read_bytes()).hexdigest()[:16]


class _ManagerProcess:
    """Runs as a Ray actor."""

    def __init__(self, config: PPOTrainerConfig, folder: str) -> None:
        os.chdir(folder)  # the driver's, from where relative paths of the config count
        models = config.actor_rollout_ref
        import_external_libs(models.model.external_lib)
        tokenizer, kwargs = hf_tokenizer(models.model.path), config.reward_model.reward_kwargs
        self._managers = [load_reward_manager(config, tokenizer, num_examine, **kwargs) for num_examine in (0, 1)]

    def score(self, data: DataProto, is_validation: bool) -> tuple[Tensor, dict[str, Any]]:
        return compute_reward(data, self._managers[int(is_validation)])


def _responses_and_lengths(batch: DataProto) -> tuple[Tensor, Tensor]:
    return batch.batch["responses"], response_lengths(batch.batch["response_mask"])

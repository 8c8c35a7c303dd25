"""A batch as texts to grade, and grades as rewards per token: what all managers of this package share."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.utils.reward_score.event_loop import finished
from verl.utils.reward_score.thoughts import PROMPT_END, prompt_end
from verl.utils.tokenizer import texts_to_grade
from verl.workers.reward_manager.abstract import RawRewardFn

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GradingSample:
    """One response with what its reward function gets; ``length`` is in tokens."""

    prompt_str: str
    solution_str: str
    ground_truth: Any
    data_source: str
    extra_info: dict[str, Any]
    length: int


def grading_samples(data: DataProto, tokenizer: Any, reward_fn_key: str) -> list[GradingSample]:
    """Every row of ``data`` (``AbstractRewardManager.__call__``) without padding and special tokens."""
    prompts, responses, mask = (data.batch[key] for key in ("prompts", "responses", "attention_mask"))
    width, columns = prompts.shape[-1], data.non_tensor_batch
    lengths = [int(one.sum()) for one in mask[:, width:]]
    asked = [row[width - int(one.sum()) :].tolist() for row, one in zip(prompts, mask[:, :width], strict=True)]
    answered = [row[:length].tolist() for row, length in zip(responses, lengths, strict=True)]
    texts = texts_to_grade(tokenizer, asked + answered)
    return [
        GradingSample(
            texts[row],
            texts[len(data) + row],
            columns["reward_model"][row]["ground_truth"],
            columns[reward_fn_key][row],
            {PROMPT_END: prompt_end(tokenizer, asked[row])}
            | dict((columns["extra_info"][row] if "extra_info" in columns else None) or {}),
            length,
        )
        for row, length in enumerate(lengths)
    ]


def grade(compute_score: RawRewardFn, sample: GradingSample) -> Any:
    """The result of one call, by upstream's names; an ``async def`` is waited for."""
    return finished(
        compute_score(
            data_source=sample.data_source,
            solution_str=sample.solution_str,
            ground_truth=sample.ground_truth,
            extra_info=sample.extra_info,
        )
    )


def score_of(result: Any) -> float:
    return float(result["score"] if isinstance(result, dict) else result)


def extra_info_of(results: Sequence[Any]) -> dict[str, list[Any]]:
    """The parts of results that are dicts, by name, each a list in the order of the results."""
    extra: dict[str, list[Any]] = defaultdict(list)
    for result in results:
        for name, value in result.items() if isinstance(result, dict) else ():
            extra[name].append(value)
    return dict(extra)


def rewards_on_last_tokens(rewards: Sequence[float], lengths: Sequence[int], data: DataProto) -> Tensor:
    """float32 [B, R] with each reward on the last token of its response."""
    scores = torch.zeros(data.batch["responses"].shape, dtype=torch.float32)
    for row, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        scores[row, max(length - 1, 0)] = reward
    return scores


def log_examples(samples: Sequence[GradingSample], results: Sequence[Any], num_examine: int) -> None:
    """Logs the first ``num_examine`` samples of each data source."""
    seen: Counter[str] = Counter()
    for sample, result in zip(samples, results, strict=True):
        seen[sample.data_source] += 1
        if seen[sample.data_source] <= num_examine:
            texts = (sample.prompt_str, sample.solution_str, sample.ground_truth, result)
            logger.info("[prompt] %s\n[response] %s\n[ground_truth] %s\n[score] %s", *texts)

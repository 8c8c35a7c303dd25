"""DAPO's manager: scores, and a penalty for responses that come near the length limit (arXiv 2503.14476, eq. 13)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.utils.reward_score import default_compute_score
from verl.workers.config import OverlongBufferConfig
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


@register("dapo")
class DAPORewardManager(AbstractRewardManager):
    """Grades like NaiveRewardManager and adds ``overlong_penalty``; a result that is a number is the part ``acc``, too.

    A run with ``reward_model.reward_manager=dapo`` grades in processes instead (``PooledRewardManager``).

    Args:
        max_resp_len: tokens of the longest response.
        overlong_buffer_cfg: ``enable``, ``len``, ``penalty_factor`` and ``log``, as keys or attributes.
    """

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: RawRewardFn | None = None,
        reward_fn_key: str = "data_source",
        max_resp_len: int | None = None,
        overlong_buffer_cfg: Any = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score or default_compute_score
        self.reward_fn_key = reward_fn_key
        self.max_resp_len = max_resp_len
        self.overlong_buffer_cfg = _buffer(overlong_buffer_cfg)
        buffer = self.overlong_buffer_cfg
        if buffer.enable and not 1 <= buffer.len <= (max_resp_len or 0):
            raise ValueError(
                f"overlong_buffer_cfg.len is {buffer.len} and max_resp_len {max_resp_len}; expected a buffer of 1 to "
                "max_resp_len tokens"
            )

    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        given = scores_of_a_model(data, return_dict=return_dict)
        if given is not None:
            return given
        samples = grading_samples(data, self.tokenizer, self.reward_fn_key)
        results = [grade(self.compute_score, sample) for sample in samples]
        log_examples(samples, results, self.num_examine)
        scores = [score_of(result) for result in results]
        extra = extra_info_of([r if isinstance(r, dict) else {"acc": r} for r in results])
        buffer = self.overlong_buffer_cfg
        if buffer.enable:
            assert self.max_resp_len is not None
            lengths = torch.tensor([sample.length for sample in samples])
            penalties = overlong_penalty(lengths, self.max_resp_len, buffer).tolist()
            scores = [score + penalty for score, penalty in zip(scores, penalties, strict=True)]
            if buffer.log:
                extra |= {"overlong_reward": penalties, "overlong": [penalty < 0 for penalty in penalties]}
        return reported(rewards_on_last_tokens(scores, samples, data), extra, return_dict=return_dict)


def overlong_penalty(lengths_B: Tensor, max_response_length: int, buffer: OverlongBufferConfig) -> Tensor:
    """Returns the penalty of each response, at most 0, fp32 [B]: ``penalty_factor`` times

    0 up to L_max - L_buffer tokens, then (L_max - L_buffer - length) / L_buffer, which is -1 at L_max, and -1 beyond.
    """
    excess_B = lengths_B.float() - (max_response_length - buffer.len)
    return -buffer.penalty_factor * (excess_B / buffer.len).clamp(min=0.0, max=1.0)


def _buffer(given: Any) -> OverlongBufferConfig:
    if given is None or isinstance(given, OverlongBufferConfig):
        return given or OverlongBufferConfig()
    names = ("enable", "len", "penalty_factor", "log")
    if isinstance(given, Mapping):
        return OverlongBufferConfig(**{name: given[name] for name in names if name in given})
    return OverlongBufferConfig(**{name: getattr(given, name) for name in names if hasattr(given, name)})

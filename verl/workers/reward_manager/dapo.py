"""DAPO's manager: scores, and a penalty for responses that come near the length limit (arXiv 2503.14476, eq. 13)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from verl.utils.dataset.rl_dataset import setting
from verl.workers.config import OverlongBufferConfig
from verl.workers.reward_manager.abstract import RawRewardFn
from verl.workers.reward_manager.naive import NaiveRewardManager, Rewards
from verl.workers.reward_manager.registry import register
from verl.workers.reward_manager.samples import GradingSample, extra_info_of


@register("dapo")
class DAPORewardManager(NaiveRewardManager):
    """Grades like NaiveRewardManager and adds ``overlong_penalty``; a result that is a number is the part ``acc``, too.

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
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key)
        self.max_resp_len = max_resp_len
        given = {key.name: setting(overlong_buffer_cfg, key.name, None) for key in fields(OverlongBufferConfig)}
        buffer = OverlongBufferConfig(**{name: value for name, value in given.items() if value is not None})
        self.overlong_buffer_cfg = buffer
        if buffer.enable and not 1 <= buffer.len <= (max_resp_len or 0):
            raise ValueError(
                f"overlong_buffer_cfg.len is {buffer.len} and max_resp_len {max_resp_len}; expected a buffer of 1 to "
                "max_resp_len tokens"
            )

    def _rewards(self, samples: Sequence[GradingSample], results: Sequence[Any]) -> Rewards:
        scores, _ = super()._rewards(samples, results)
        extra = extra_info_of([result if isinstance(result, dict) else {"acc": result} for result in results])
        buffer = self.overlong_buffer_cfg
        if buffer.enable:
            assert self.max_resp_len is not None
            lengths = torch.tensor([sample.length for sample in samples])
            penalties = overlong_penalty(lengths, self.max_resp_len, buffer).tolist()
            scores = [score + penalty for score, penalty in zip(scores, penalties, strict=True)]
            if buffer.log:
                extra |= {"overlong_reward": penalties, "overlong": [penalty < 0 for penalty in penalties]}
        return scores, extra


def overlong_penalty(lengths_B: Tensor, max_response_length: int, buffer: OverlongBufferConfig) -> Tensor:
    """Returns the penalty of each response, at most 0, fp32 [B]: ``penalty_factor`` times

    0 up to L_max - L_buffer tokens, then (L_max - L_buffer - length) / L_buffer, which is -1 at L_max, and -1 beyond.
    """
    excess_B = lengths_B.float() - (max_response_length - buffer.len)
    return -buffer.penalty_factor * (excess_B / buffer.len).clamp(min=0.0, max=1.0)

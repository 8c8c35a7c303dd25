"""The manager that grades one response after the other, in this process, and what the others change about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager.abstract import AbstractRewardManager, RawRewardFn
from verl.workers.reward_manager.registry import register
from verl.workers.reward_manager.samples import (
    GradingSample,
    extra_info_of,
    grade,
    grading_samples,
    log_examples,
    rewards_on_last_tokens,
    score_of,
)

Rewards = tuple[list[float], dict[str, list[Any]]]  # of each response; its other numbers and texts by name


@register("naive")
class NaiveRewardManager(AbstractRewardManager):
    """Puts each response's score on its last token; scores ``rm_scores`` that a batch brings are its rewards.

    A run with ``reward_model.reward_manager`` naive, batch, prime or dapo grades in processes instead
    (``PooledRewardManager``).

    Attributes:
        adds_acc: the scores become the column ``acc`` of the batch too, float32 [B].
    """

    adds_acc: ClassVar[bool] = False

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
        if "rm_scores" in data.batch:
            rewards = data.batch["rm_scores"]
            extra = {name: list(data.non_tensor_batch[name]) for name in data.meta_info.get("reward_extra_keys", [])}
        else:
            samples = grading_samples(data, self.tokenizer, self.reward_fn_key)
            results = self._grade(samples)
            log_examples(samples, results, self.num_examine)
            scores, extra = self._rewards(samples, results)
            if self.adds_acc:
                data.batch["acc"] = torch.tensor(scores, dtype=torch.float32)
            rewards = rewards_on_last_tokens(scores, [sample.length for sample in samples], data)
        return {"reward_tensor": rewards, "reward_extra_info": extra} if return_dict else rewards

    def _grade(self, samples: Sequence[GradingSample]) -> list[Any]:
        """What the function returns for each sample: a number, or a dict with ``score``."""
        return [grade(self.compute_score, sample) for sample in samples]

    def _rewards(self, samples: Sequence[GradingSample], results: Sequence[Any]) -> Rewards:
        return [score_of(result) for result in results], extra_info_of(results)


# v0.9.0's name of it for functions whose parts ``algorithm.adv_estimator=gdpo`` reads.
register("gdpo")(NaiveRewardManager)

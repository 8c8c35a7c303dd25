"""What a reward manager is: a callable that scores a whole batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from verl.protocol import DataProto

RawRewardFn = Callable[..., Any]


class AbstractRewardManager(ABC):
    """Scores a batch with a reward function.

    Args:
        num_examine: samples of each data source that a call logs.
        compute_score: (data_source, solution_str, ground_truth, extra_info) -> a number, or a dict with ``score``.
        reward_fn_key: column with the data source.
        kwargs: ``reward_model.reward_kwargs``.
    """

    @abstractmethod
    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: RawRewardFn | None,
        reward_fn_key: str = "data_source",
        **kwargs: Any,
    ) -> None: ...

    @abstractmethod
    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        """Rewards per token, float32 [B, R]; or ``reward_tensor`` and ``reward_extra_info``, lists of B by name.

        ``data`` has int64 ``prompts`` [B, P] (padded on the left), ``responses`` [B, R] (on the right) and
        ``attention_mask`` [B, P + R]; ``reward_model`` with ``ground_truth``, the data source, and ``extra_info``.
        """

"""What a reward manager that grades one sample at a time is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from verl.protocol import DataProto
from verl.utils.reward_score.event_loop import shared_loop


class RewardManagerBase(ABC):
    """Grades samples, many at a time on one event loop; a run makes one for training and one for validation.

    Args:
        config: the whole config as an OmegaConf tree, with upstream's section ``reward`` too.
        compute_score: the function of ``custom_reward_function``, plain or ``async``, or the built-in one.

    Attributes:
        loop: the event loop; what blocks can be awaited as ``self.loop.run_in_executor(None, function)``.
    """

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any) -> None:
        self.config, self.tokenizer, self.compute_score = config, tokenizer, compute_score
        self.loop = shared_loop()
        self.init_class(config, tokenizer)

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any) -> None:
        """For what the managers of a class share, such as a limit of requests."""
        return

    @abstractmethod
    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """``reward_score``, a number, and ``reward_extra_info``, numbers and texts by name, of the one row of ``data``.

        Its columns are those that ``AbstractRewardManager.__call__`` has.
        """

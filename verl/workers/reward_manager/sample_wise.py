"""A manager that grades one sample at a time, as upstream's reward loop has them, as one that takes whole batches."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from typing import Any

from verl.protocol import DataProto
from verl.utils.reward_score.event_loop import finished
from verl.utils.reward_score.scoring_worker import sample_result
from verl.workers.reward_manager.abstract import AbstractRewardManager
from verl.workers.reward_manager.samples import rewards_on_last_tokens

GRADER_ERROR = "grader_error"  # in reward_extra_info: why a sample has no grade; None where it has one


class SampleWiseManager(AbstractRewardManager):
    """Calls ``run_single`` of a user's manager for each row, and puts each ``reward_score`` on the last token.

    A sample has no grade where the call raises, or returns no finite ``reward_score``.

    Args:
        manager_class: the user's; it is made on the event loop that its calls run on.
        max_concurrent: the most calls of an ``async def`` that wait at the same time.
    """

    def __init__(self, manager_class: type, arguments: Mapping[str, Any], max_concurrent: int) -> None:
        async def made() -> Any:
            return manager_class(**arguments)

        self.manager, self.max_concurrent = finished(made()), max_concurrent

    def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
        found = [_numbers_and_texts(row, result) for row, result in enumerate(finished(self._results(data)))]
        names = dict.fromkeys(name for one in found for name in one)
        extra: dict[str, list[Any]] = {name: [one.get(name) for one in found] for name in names}
        lengths = data.batch["attention_mask"][:, data.batch["prompts"].shape[-1] :].sum(-1).tolist()
        rewards = rewards_on_last_tokens(extra["score"], lengths, data)
        return {"reward_tensor": rewards, "reward_extra_info": extra} if return_dict else rewards

    async def _results(self, data: DataProto) -> list[Any]:
        """What ``run_single`` returned for each row, as a reward function returns it, or its exception."""
        free = asyncio.Semaphore(self.max_concurrent)

        async def of_row(row: int) -> Any:
            async with free:
                try:
                    result = self.manager.run_single(data[row : row + 1])
                    return _as_of_function(await result if inspect.isawaitable(result) else result)
                except (Exception, SystemExit) as error:  # a process edge: what the user's code raises is this row's
                    return error

        return await asyncio.gather(*map(of_row, range(len(data))))


def grades_samples(manager_class: type) -> bool:
    """Whether a class has ``run_single`` and no ``__call__``, which would take a batch."""
    return hasattr(manager_class, "run_single") and not any("__call__" in vars(base) for base in manager_class.__mro__)


def _as_of_function(result: Any) -> dict[str, Any]:
    if not isinstance(result, Mapping) or "reward_score" not in result:
        raise ValueError(f"it returned {result!r:.200}; expected a dict with reward_score")
    return {**(result.get("reward_extra_info") or {}), "score": result["reward_score"]}


def _numbers_and_texts(row: int, result: Any) -> dict[str, Any]:
    """``score`` and all else that a sample's grade has, or why it has none."""
    found = sample_result(result)
    if "parts" in found:
        return {**found["parse"], **found["parts"]}
    return {"score": 0.0, GRADER_ERROR: f"run_single of sample {row}: {found.get('error') or found['timeout']}"}

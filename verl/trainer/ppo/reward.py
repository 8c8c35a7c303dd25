"""Rewards by what the config names: the reward function, and the reward manager of a run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from verl.protocol import DataProto
from verl.trainer.config import PPOTrainerConfig
from verl.utils.import_utils import load_extern_type
from verl.utils.reward_score import default_compute_score
from verl.utils.reward_score.functions import RewardFunctionSpec, function_of
from verl.workers.reward_manager import AbstractRewardManager, get_reward_manager_cls
from verl.workers.reward_manager.abstract import RawRewardFn


def get_custom_reward_fn(config: PPOTrainerConfig) -> RawRewardFn | None:
    """The function of ``custom_reward_function`` with its ``reward_kwargs``; None where the config names none.

    With ``by_data_source`` the function that is returned calls the one of its first argument.

    Raises:
        ValueError: a file or a function does not exist.
    """
    custom = config.custom_reward_function
    functions = {source: _loaded(spec) for source, spec in custom.sources.items()}
    default = None if custom.default is None else _loaded(custom.default)
    if not functions:
        return default

    def of_data_source(data_source: str, *values: Any, **named: Any) -> Any:
        spec = function_of(data_source, custom.sources, None)
        source = next((source for source, given in custom.sources.items() if given == spec), None)
        function = default or default_compute_score if source is None else functions[source]
        return function(data_source, *values, **named)

    return of_data_source


def load_reward_manager(
    config: PPOTrainerConfig, tokenizer: Any, num_examine: int, **reward_kwargs: Any
) -> AbstractRewardManager:
    """The manager that ``reward_model.reward_manager`` names, with the function that the config names."""
    manager_class: Any = get_reward_manager_cls(config.reward_model.reward_manager)
    manager: AbstractRewardManager = manager_class(
        tokenizer=tokenizer,
        num_examine=num_examine,
        compute_score=get_custom_reward_fn(config) or default_compute_score,
        reward_fn_key="data_source",
        **reward_kwargs,
    )
    return manager


def compute_reward(data: DataProto, reward_fn: AbstractRewardManager) -> tuple[Tensor, dict[str, Any]]:
    """Rewards per token [B, R], and the manager's other numbers and texts by name."""
    result = reward_fn(data, return_dict=True)
    if not isinstance(result, Mapping):
        return result, {}
    return result["reward_tensor"], dict(result.get("reward_extra_info") or {})


def _loaded(spec: RewardFunctionSpec) -> RawRewardFn:
    function = load_extern_type(spec.path, spec.name)
    return partial(function, **spec.kwargs) if spec.kwargs else function

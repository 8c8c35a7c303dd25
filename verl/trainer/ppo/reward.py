"""Rewards by what the config names: the reward function, and the reward manager of a run."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from omegaconf import OmegaConf
from torch import Tensor

from verl.protocol import DataProto
from verl.trainer.config import PPOTrainerConfig
from verl.utils.import_utils import load_extern_type
from verl.utils.reward_score import default_compute_score
from verl.utils.reward_score.functions import RewardFunctionSpec, function_of
from verl.workers.config import RewardModelConfig
from verl.workers.reward_manager import AbstractRewardManager, get_reward_manager_cls
from verl.workers.reward_manager.abstract import RawRewardFn
from verl.workers.reward_manager.sample_wise import SampleWiseManager, grades_samples


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


def reward_manager_class(config: RewardModelConfig) -> Any:
    """The class that the config names, by its registered name or by file; ValueError says what is missing."""
    spec = config.manager_spec
    return get_reward_manager_cls(config.reward_manager) if spec is None else load_extern_type(spec.path, spec.name)


def load_reward_manager(
    config: PPOTrainerConfig, tokenizer: Any, num_examine: int, **reward_kwargs: Any
) -> AbstractRewardManager:
    """The manager that ``reward_model`` names, with the function that the config names."""
    manager_class = reward_manager_class(config.reward_model)
    given = {"tokenizer": tokenizer, "num_examine": num_examine, "reward_fn_key": "data_source", **reward_kwargs}
    given["compute_score"] = get_custom_reward_fn(config) or default_compute_score
    arguments = manager_arguments(manager_class, config, given)
    if grades_samples(manager_class):
        return SampleWiseManager(manager_class, arguments, config.reward_model.max_concurrent)
    manager: AbstractRewardManager = manager_class(**arguments)
    return manager


def manager_arguments(manager_class: type, config: PPOTrainerConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a manager is made with; one of samples gets the config, and of the rest what its signature names.

    The config is an OmegaConf tree, with upstream's section ``reward`` too.
    """
    if not grades_samples(manager_class):
        return dict(given)
    tree, name = asdict(config), config.reward_model.reward_manager
    tree["reward"] = tree["reward_model"] | {"reward_manager": {"name": name}}
    named = {"reward_router_address": None, "reward_model_tokenizer": None, **given}
    always = {"config": OmegaConf.create(tree)} | {name: named.pop(name) for name in ("tokenizer", "compute_score")}
    parameters = inspect.signature(manager_class).parameters
    return always | {name: value for name, value in named.items() if name in parameters}


def compute_reward(data: DataProto, reward_fn: AbstractRewardManager) -> tuple[Tensor, dict[str, Any]]:
    """Rewards per token [B, R], and the manager's other numbers and texts by name."""
    result = reward_fn(data, return_dict=True)
    if not isinstance(result, Mapping):
        return result, {}
    return result["reward_tensor"], dict(result.get("reward_extra_info") or {})


def _loaded(spec: RewardFunctionSpec) -> RawRewardFn:
    function = load_extern_type(spec.path, spec.name)
    return partial(function, **spec.kwargs) if spec.kwargs else function

"""Rewards by what the config names: upstream's functions for it, and the scorer of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from functools import partial
from typing import Any

import ray
from omegaconf import OmegaConf
from torch import Tensor

from verl.protocol import DataProto
from verl.utils.import_utils import load_extern_type
from verl.utils.reward_score import default_compute_score
from verl.utils.reward_score.functions import RewardFunctionSpec, function_of
from verl.workers.config import CustomRewardFunctionConfig
from verl.workers.reward_manager import (
    AbstractRewardManager,
    get_reward_manager_cls,
)
from verl.workers.reward_manager.abstract import RawRewardFn


def get_custom_reward_fn(config: Any) -> RawRewardFn | None:
    """The function of ``custom_reward_function`` with its ``reward_kwargs``; None where the config names none.

    With ``by_data_source`` the function that is returned calls the one of its first argument.

    Raises:
        ValueError: a file or a function does not exist.
    """
    section = _section(config, "custom_reward_function")
    known = CustomRewardFunctionConfig.__dataclass_fields__
    custom = CustomRewardFunctionConfig(**{key: value for key, value in section.items() if key in known})
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


def load_reward_manager(config: Any, tokenizer: Any, num_examine: int, **reward_kwargs: Any) -> AbstractRewardManager:
    """The manager that ``reward_model.reward_manager`` names, with the function that the config names."""
    manager_class = get_reward_manager_cls(_section(config, "reward_model").get("reward_manager") or "naive")
    return manager_class(
        tokenizer=tokenizer,
        num_examine=num_examine,
        compute_score=get_custom_reward_fn(config) or default_compute_score,
        reward_fn_key=_section(config, "data").get("reward_fn_key") or "data_source",
        **reward_kwargs,
    )


def compute_reward(data: DataProto, reward_fn: AbstractRewardManager) -> tuple[Tensor, dict[str, Any]]:
    """Rewards per token [B, R], and the manager's other numbers and texts by name."""
    result = reward_fn(data, return_dict=True)
    if not isinstance(result, Mapping):
        return result, {}
    return result["reward_tensor"], dict(result.get("reward_extra_info") or {})


@ray.remote(num_cpus=1)
def compute_reward_async(
    data: DataProto, config: Any = None, tokenizer: Any = None, reward_fn: AbstractRewardManager | None = None
) -> tuple[Tensor, dict[str, Any]]:
    """``compute_reward`` as a Ray task, with ``reward_fn`` or the manager that ``config`` names."""
    if reward_fn is None:
        kwargs = _section(config, "reward_model").get("reward_kwargs") or {}
        reward_fn = load_reward_manager(config, tokenizer, num_examine=0, **kwargs)
    return compute_reward(data, reward_fn)


def _loaded(spec: RewardFunctionSpec) -> RawRewardFn:
    function = load_extern_type(spec.path, spec.name)
    return partial(function, **spec.kwargs) if spec.kwargs else function


def _section(config: Any, name: str) -> dict[str, Any]:
    """A section of a typed config, of an OmegaConf tree or of a dict, as a dict; empty where it is absent."""
    section = config.get(name) if hasattr(config, "get") else getattr(config, name, None)
    if section is None:
        return {}
    if is_dataclass(section) and not isinstance(section, type):
        return asdict(section)
    plain: Any = OmegaConf.to_container(section, resolve=True) if OmegaConf.is_config(section) else section
    return dict(plain)

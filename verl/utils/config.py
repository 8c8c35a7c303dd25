"""From a user's YAML to dataclasses, and the check of a whole config (upstream: ``verl.utils.config``)."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.trainer.config import ConfigError, PPOTrainerConfig, resolve_config
from verl.trainer.config import validate_config as config_problems
from verl.trainer.config.load import unlock
from verl.utils.import_utils import load_provider

__all__ = ["omega_conf_to_dataclass", "update_dict_with_config", "validate_config"]

_TARGET = "_target_"


def omega_conf_to_dataclass(config: DictConfig | dict | Any, dataclass_type: type[Any] | None = None) -> Any:
    """The dataclass that ``config`` describes.

    Args:
        config: its fields. An empty one gives the class's defaults. A dataclass is returned as it is.
        dataclass_type: the class; without it, the one that ``_target_`` names, at every depth.

    Raises:
        ValueError: there is no ``_target_``, or ``dataclass_type`` is no dataclass.
    """
    if dataclass_type is None:
        if not isinstance(config, DictConfig | dict):
            return config
        if _TARGET not in config:
            raise ValueError(f"a config without {_TARGET} needs a dataclass_type; keys: {sorted(map(str, config))}")
        plain = OmegaConf.to_container(OmegaConf.create(config), resolve=True)
        return _instantiate(plain)
    if not (isinstance(dataclass_type, type) and is_dataclass(dataclass_type)):
        raise ValueError(f"{dataclass_type} must be a dataclass")
    if is_dataclass(config):
        return config
    if not config:
        return dataclass_type()
    schema: Any = OmegaConf.structured(dataclass_type)
    unlock(schema)
    given = _without_targets(OmegaConf.to_container(OmegaConf.create(config), resolve=True), schema)
    return OmegaConf.to_object(OmegaConf.merge(schema, given))


def update_dict_with_config(dictionary: dict, config: DictConfig) -> None:
    """Gives the keys of ``dictionary`` the values that ``config`` has for them."""
    for key in dictionary:
        if key in config:
            dictionary[key] = config[key]


def validate_config(config: DictConfig | PPOTrainerConfig, use_reference_policy: bool, use_critic: bool) -> None:
    """Checks a whole config; the ValueError lists every problem.

    ``use_reference_policy`` and ``use_critic`` say what the caller's workers are; there is no critic here.
    """
    typed = resolve_config(config)[0] if isinstance(config, DictConfig) else config
    problems = config_problems(typed)
    if use_critic:
        problems.append("use_critic=True: there is no critic; choose an algorithm.adv_estimator without values")
    if typed.use_reference_policy and not use_reference_policy:
        problems.append("the config uses a KL to the reference, and no worker has the role of a reference policy")
    if problems:
        raise ConfigError(problems)


def _without_targets(node: Any, schema: Any) -> Any:
    """``node`` without the ``_target_`` of sections whose class has no such field."""
    if not isinstance(node, dict):
        return node
    known = schema if isinstance(schema, DictConfig) else {}
    kept = {key: value for key, value in node.items() if key != _TARGET or key in known}
    return {key: _without_targets(value, known.get(key) if key in known else None) for key, value in kept.items()}


def _instantiate(node: Any) -> Any:
    if isinstance(node, list):
        return [_instantiate(value) for value in node]
    if not isinstance(node, dict):
        return node
    values = {key: _instantiate(value) for key, value in node.items() if key != _TARGET}
    if not node.get(_TARGET):
        return values
    module, _, name = node[_TARGET].rpartition(".")
    return load_provider(f"{module}:{name}")(**values)

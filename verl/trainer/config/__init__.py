"""The typed configuration tree of a run; imports neither torch nor ray."""

from verl.trainer.config.algorithm import AlgoConfig
from verl.trainer.config.config import PPOTrainerConfig
from verl.trainer.config.fixed_keys import WithoutEffect, variables_without_effect, without_effect_block
from verl.trainer.config.load import ConfigError, compose_config, load_config, resolve_config
from verl.trainer.config.trainer import TrainerConfig
from verl.trainer.config.validate import config_warnings, validate_config

__all__ = [
    "AlgoConfig",
    "ConfigError",
    "PPOTrainerConfig",
    "TrainerConfig",
    "WithoutEffect",
    "compose_config",
    "config_warnings",
    "load_config",
    "resolve_config",
    "validate_config",
    "variables_without_effect",
    "without_effect_block",
]

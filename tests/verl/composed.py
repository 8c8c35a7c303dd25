"""``compose_config`` of verl's base configuration for tests that need it a hundred times: Hydra reads it once."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from verl.trainer.config import compose_config


def composed(*overrides: str) -> DictConfig:
    """The tree with ``key=value`` overrides, which may begin with ``+``."""
    config = deepcopy(_base())
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        OmegaConf.update(config, override.key_or_group, override.value(), force_add=True)
    return config


@cache
def _base() -> DictConfig:
    return compose_config()

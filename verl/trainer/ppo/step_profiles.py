"""Profiles of the steps that ``global_profiler.steps`` names: starts and stops the profilers of the worker groups."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from verl.trainer.ppo.observers import StepObserver
from verl.workers.config.profiler import GlobalProfilerConfig

logger = logging.getLogger(__name__)


class StepProfiles(StepObserver):
    """Records whole steps, with their validation and saving; other steps make no call."""

    def __init__(self, config: GlobalProfilerConfig, groups: Sequence[Any]) -> None:
        self._config, self._groups = config, groups

    def before_step(self, number: int) -> None:
        if self._config.starts_at(number):
            for group in self._groups:
                group.start_profile(f"step_{number}")

    def after_step(self, number: int) -> None:
        if self._config.stops_after(number):
            written = [path for group in self._groups for path in group.stop_profile() if path is not None]
            logger.info("profile until step %d: %s", number, ", ".join(sorted(set(written))))

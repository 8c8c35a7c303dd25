"""Where a run's metrics can go besides its own files: one module for each tracking package.

A module imports its package only when its class is made, so that naming no tracker needs none of them.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

COLUMNS = ["step", "input", "output", "score"]  # of the samples of a validation


@dataclass(frozen=True)
class Tracker:
    """The package of a tracker, as ``pip install`` names it, and the class that writes to it as ``module:name``."""

    package: str
    provider: str

    def load(self) -> Any:
        module, _, name = self.provider.partition(":")
        return getattr(importlib.import_module(module), name)


# Names of ``trainer.logger`` that need a package of their own. Module and package have the same name.
TRACKERS = {
    "wandb": Tracker("wandb", "verl.utils.trackers.wandb_run:WandbLogger"),
    "mlflow": Tracker("mlflow", "verl.utils.trackers.mlflow_run:MlflowLogger"),
    "swanlab": Tracker("swanlab", "verl.utils.trackers.swanlab_run:SwanlabLogger"),
    "trackio": Tracker("trackio", "verl.utils.trackers.trackio_run:TrackioLogger"),
    "clearml": Tracker("clearml", "verl.utils.trackers.clearml_run:ClearMLLogger"),
}


def missing_packages(names: Iterable[str]) -> list[str]:
    """One sentence, with the pip line, for each named tracker whose package is not installed; imports nothing."""
    return [
        f"trainer.logger names {name}, but its package is not installed here: pip install {TRACKERS[name].package}"
        for name in names
        if name in TRACKERS and importlib.util.find_spec(TRACKERS[name].package) is None
    ]

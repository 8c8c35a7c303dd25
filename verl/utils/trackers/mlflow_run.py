"""MLflow. MLFLOW_TRACKING_URI says where runs go; without it, where MLflow puts them: ``mlflow.db`` in this folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from verl.utils.trackers import COLUMNS

_MOST_PARAMS = 100  # of one request
_LONGEST_PARAM = 500  # characters that every store takes


class MlflowLogger:
    """A run ``experiment_name`` in MLflow's experiment ``project_name``; the config is its parameters, by dotted key.

    Args:
        run_id: the run that is continued; None starts one.
    """

    def __init__(
        self, project_name: str, experiment_name: str, config: Mapping[str, Any], directory: str, run_id: str | None
    ) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment(project_name)
        self.run_id = str(mlflow.start_run(run_id=run_id, run_name=experiment_name).info.run_id)
        if run_id is None:  # parameters of a run cannot change
            params = list(_flat(config).items())
            for first in range(0, len(params), _MOST_PARAMS):
                mlflow.log_params(dict(params[first : first + _MOST_PARAMS]))

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self._mlflow.log_metrics({metric_name(name): float(value) for name, value in data.items()}, step=step)

    def log_generations(self, samples: Sequence[Sequence[Any]], step: int) -> None:
        """The artifact ``val_generations/step_N.json``: a list of {input, output, score}."""
        rows = [dict(zip(COLUMNS[1:], sample, strict=True)) for sample in samples]
        self._mlflow.log_text(json.dumps(rows, ensure_ascii=False, indent=1), f"val_generations/step_{step}.json")

    def finish(self, *, is_done: bool = True) -> None:
        self._mlflow.end_run("FINISHED" if is_done else "FAILED")


def metric_name(name: str) -> str:
    """The name as MLflow takes it: letters, digits, ``_-. :/``; ``mean@8`` becomes ``mean_at_8``."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"), flags=re.ASCII)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{name}.")
        else:
            flat[metric_name(name)] = str(value)[:_LONGEST_PARAM]
    return flat

"""Weights & Biases. Its own variables work: WANDB_API_KEY, WANDB_MODE=offline, WANDB_DIR, WANDB_BASE_URL and others."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from verl.utils.trackers import COLUMNS


class WandbLogger:
    """A run of wandb.

    Args:
        directory: where wandb makes its folder ``wandb/`` if WANDB_DIR is not set.
        run_id: the run that is continued; None starts one.
    """

    def __init__(
        self, project_name: str, experiment_name: str, config: Mapping[str, Any], directory: str, run_id: str | None
    ) -> None:
        import wandb

        self._wandb = wandb
        folder = None if "WANDB_DIR" in os.environ else directory
        resume = "allow" if run_id else None
        self._run = wandb.init(
            project=project_name, name=experiment_name, config=dict(config), dir=folder, id=run_id, resume=resume
        )
        self.run_id = str(self._run.id)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self._run.log(dict(data), step=step)

    def log_generations(self, samples: Sequence[Sequence[Any]], step: int) -> None:
        """The table ``val/generations``: a row with (input, output, score) of each sample.

        wandb keeps a table per step, since a table that was logged cannot grow.
        """
        table = self._wandb.Table(columns=COLUMNS, data=[[step, *sample] for sample in samples])
        self._run.log({"val/generations": table}, step=step)

    def finish(self, *, is_done: bool = True) -> None:
        exit_code = 0 if is_done else 1
        self._run.finish(exit_code=exit_code)
        self._wandb.teardown(exit_code=exit_code)  # ends wandb's own process

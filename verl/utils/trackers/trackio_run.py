"""Trackio, a tracker on this machine or in a Hugging Face Space; TRACKIO_DIR says where its data base is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.utils.trackers import COLUMNS


class TrackioLogger:
    """A run of Trackio.

    Args:
        run_id: the name of the run that is continued; None starts one.
    """

    def __init__(
        self, project_name: str, experiment_name: str, config: Mapping[str, Any], directory: str, run_id: str | None
    ) -> None:
        import trackio

        self._trackio = trackio
        run = trackio.init(
            project=project_name,
            name=run_id or experiment_name,
            config=dict(config),
            resume="allow" if run_id else "never",
            embed=False,
        )
        self.run_id = str(run.name)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self._trackio.log(dict(data), step=step)

    def log_generations(self, samples: Sequence[Sequence[Any]], step: int) -> None:
        """The table ``val/generations``: a row with (input, output, score) of each sample."""
        table = self._trackio.Table(columns=COLUMNS, data=[[step, *sample] for sample in samples])
        self._trackio.log({"val/generations": table}, step=step)

    def finish(self, *, is_done: bool = True) -> None:
        self._trackio.finish()

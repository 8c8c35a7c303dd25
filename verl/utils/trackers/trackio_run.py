"""Trackio, a tracker on this machine or in a Hugging Face Space; TRACKIO_DIR says where its data base is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class TrackioLogger:
    """A run of Trackio.

    Args:
        run_id: the name of the run that is continued; None starts one.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        config: Mapping[str, Any] | None,
        *,
        directory: str | None = None,
        run_id: str | None = None,
    ) -> None:
        import trackio

        self._trackio = trackio
        run = trackio.init(
            project=project_name,
            name=run_id or experiment_name,
            config=dict(config or {}),
            resume="allow" if run_id else "never",
            embed=False,
        )
        self.run_id = str(run.name)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self._trackio.log(dict(data), step=step)

    def finish(self, *, is_done: bool = True) -> None:
        self._trackio.finish()


def log_generations(samples: Sequence[Sequence[Any]], step: int) -> None:
    """The table ``val/generations`` of the current run: a row with (input, output, score) of each sample."""
    import trackio

    rows = [[step, *sample] for sample in samples]
    trackio.log({"val/generations": trackio.Table(columns=["step", "input", "output", "score"], data=rows)}, step=step)

"""Send the metrics of a run to the trackers that ``trainer.logger`` names."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from hf_formats.files import write_bytes
from verl.utils.errors import BatchError
from verl.utils.metrics_file import MetricsFile, console_line
from verl.utils.trackers import TRACKERS

logger = logging.getLogger(__name__)

_STATE = "trackers.json"  # name of the tracker -> its run, and the last step that it has


class Tracking:
    """Writes metrics to each of some backends.

    Args:
        default_backend: name or names out of ``supported_backend``.
        config: of the whole run; the trackers show it.
        directory: the folder of a run. It gets ``metrics.jsonl``, whatever the backends, ``tensorboard/``, and
            ``trackers.json`` with the trackers' runs, which a resumed run continues.
        first_step: the step after the checkpoint that is resumed; metrics.jsonl and TensorBoard lose it and later ones,
            because those steps will be run again. Trackers cannot forget: they keep the first values of such steps.

    Attributes:
        logger: the backends by name.

    Raises:
        ValueError: a name is not known, or a tracker does not start.
    """

    supported_backend: ClassVar = [*TRACKERS, "tensorboard", "console", "file"]

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | list[str] = "console",
        config: Mapping[str, Any] | None = None,
        *,
        directory: str,
        first_step: int = 0,
    ) -> None:
        names = [default_backend] if isinstance(default_backend, str) else list(default_backend)
        for name in names:
            if name not in self.supported_backend:
                raise BatchError(f"logger {name!r} is not known; expected {', '.join(self.supported_backend)}")
        self.logger: dict[str, Any] = {}
        self._state_file = Path(directory) / _STATE
        self._runs: dict[str, dict[str, Any]] = self._continued_runs() if first_step else {}
        self._failed: set[str] = set()
        for name in names:
            if name in TRACKERS:
                run_id = self._runs.get(name, {}).get("run_id")
                place = {"directory": directory, "run_id": run_id}
                try:
                    tracker = TRACKERS[name].load()(project_name, experiment_name, config or {}, **place)
                except Exception as error:  # a process edge: a login that is missing, a server that is away
                    raise ValueError(f"trainer.logger: {name} cannot start: {type(error).__name__}: {error}") from error
                self.logger[name] = tracker
                self._runs.setdefault(name, {"last_step": -1})["run_id"] = tracker.run_id
            elif name == "tensorboard":
                self.logger[name] = _TensorBoard(directory, first_step)
            elif name == "console":
                self.logger[name] = _Console()
        self.logger["file"] = MetricsFile(directory, first_step)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Writes the metrics of one step to all backends."""
        for name, writer in self.logger.items():
            if self._takes(name, step):
                try:
                    writer.log(data, step)
                except Exception as error:  # a process edge: a server that is away must not end the run
                    self._report(name, error)
        for name in self._runs.keys() & self.logger.keys():
            self._runs[name]["last_step"] = max(step, self._runs[name]["last_step"])
        self._write_state()

    def log_generations(self, samples: Sequence[Sequence[Any]], step: int) -> None:
        """Shows samples of a validation, each (input, output, score), in the trackers; before the step's metrics."""
        for name, writer in self.logger.items():
            if name not in ("console", "file") and self._takes(name, step):
                try:
                    writer.log_generations(samples, step)
                except Exception as error:  # as above
                    self._report(name, error)

    def finish(self, *, is_done: bool = True) -> None:
        """Ends the trackers' runs, as failed ones unless ``is_done``; a second call does nothing."""
        writers, self.logger = self.logger, {}
        for name, writer in writers.items():
            try:
                writer.finish(is_done=is_done)
            except Exception as error:  # as above
                self._report(name, error)

    def _takes(self, name: str, step: int) -> bool:
        """False for a step that the tracker has from before a resume."""
        return name not in self._runs or step > self._runs[name]["last_step"]

    def _report(self, name: str, error: Exception) -> None:
        """Raises the errors of the run's own files, and reports the first of each tracker."""
        if name not in TRACKERS:
            raise error
        if name not in self._failed:
            logger.warning("%s: %s: %s; metrics.jsonl still has everything", name, type(error).__name__, error)
        self._failed.add(name)

    def _continued_runs(self) -> dict[str, dict[str, Any]]:
        if not self._state_file.is_file():
            return {}
        runs: dict[str, dict[str, Any]] = json.loads(self._state_file.read_text())
        return runs

    def _write_state(self) -> None:
        if self._runs:
            write_bytes(self._state_file, json.dumps(self._runs).encode())


class _Console:
    """One line a step: the figures of a run that matter most."""

    def log(self, data: Mapping[str, float], step: int) -> None:
        print(console_line(data, step), flush=True)

    def finish(self, *, is_done: bool = True) -> None:
        """Nothing is open."""


class _TensorBoard:
    """Writes to ``directory/tensorboard``."""

    def __init__(self, directory: str, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(Path(directory) / "tensorboard"), purge_step=first_step)

    def log(self, data: Mapping[str, float], step: int) -> None:
        for name, value in data.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_generations(self, samples: Sequence[Sequence[Any]], step: int) -> None:
        """The text ``val/generations`` with a code block each for input and output, as they are."""
        blocks = [f"    {text}".replace("\n", "\n    ") for sample in samples for text in map(str, sample)]
        self._writer.add_text("val/generations", "\n\n---\n\n".join(blocks), step)
        self._writer.flush()

    def finish(self, *, is_done: bool = True) -> None:
        self._writer.close()

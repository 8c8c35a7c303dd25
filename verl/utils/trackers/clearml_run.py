"""ClearML, by its own configuration file and variables (CLEARML_API_ACCESS_KEY, CLEARML_OFFLINE_MODE=1 and others)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from verl.utils.trackers import COLUMNS


class ClearMLLogger:
    """A task of ClearML; metric ``a/b/c`` is the series ``b/c`` of the plot ``a``.

    Args:
        run_id: the task that is continued; None starts one.
    """

    def __init__(
        self, project_name: str, experiment_name: str, config: Mapping[str, Any], directory: str, run_id: str | None
    ) -> None:
        from clearml import Task

        self._task = Task.init(
            project_name=project_name,
            task_name=experiment_name,
            continue_last_task=run_id or False,
            reuse_last_task_id=False,
            output_uri=False,
            auto_connect_arg_parser=False,
            auto_connect_frameworks=False,
        )
        self.run_id = str(self._task.id)
        self._task.connect_configuration(dict(config), name="config")

    def log(self, data: Mapping[str, Any], step: int) -> None:
        logger = self._task.get_logger()
        for name, value in data.items():
            title, _, series = name.partition("/")
            logger.report_scalar(title, series or title, float(value), step)

    def log_generations(self, samples: Sequence[Sequence[Any]], step: int) -> None:
        """The text report of the task: a line of JSON with input, output and score of each sample."""
        for sample in samples:
            row = dict(zip(COLUMNS, (step, *sample), strict=True))
            self._task.get_logger().report_text(json.dumps(row, ensure_ascii=False), print_console=False)

    def finish(self, *, is_done: bool = True) -> None:
        if not is_done:
            self._task.mark_failed(ignore_errors=True, status_reason="the run ended before its last step")
        self._task.close()

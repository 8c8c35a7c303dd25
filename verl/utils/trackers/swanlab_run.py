"""SwanLab. SWANLAB_MODE (online, local, offline, disabled), SWANLAB_API_KEY and SWANLAB_LOG_DIR are its variables."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class SwanlabLogger:
    """A run of SwanLab (0.10 and later).

    Args:
        directory: its folder ``swanlog/`` is used if SWANLAB_LOG_DIR is not set.
        run_id: the run that is continued; None starts one.
    """

    def __init__(
        self, project_name: str, experiment_name: str, config: Mapping[str, Any], directory: str, run_id: str | None
    ) -> None:
        import swanlab

        self._swanlab = swanlab
        folder = os.environ.get("SWANLAB_LOG_DIR") or str(Path(directory) / "swanlog")
        Path(folder).mkdir(parents=True, exist_ok=True)
        run = swanlab.init(
            project=project_name,
            name=experiment_name,
            config={"FRAMEWORK": "verl", **config},
            log_dir=folder,
            mode=os.environ.get("SWANLAB_MODE"),
            id=run_id,
            resume="allow" if run_id else None,
        )
        self.run_id = str(run.id)

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self._swanlab.log(dict(data), step=step)

    def log_generations(self, samples: Sequence[Sequence[Any]], step: int) -> None:
        """The texts ``val/generations``, one for each sample, with input, output and score."""
        texts = []
        for index, (prompt, response, score) in enumerate(samples):
            text = f"input: {prompt}\n\n---\n\noutput: {response}\n\n---\n\nscore: {score}"
            texts.append(self._swanlab.Text(text, caption=f"sample {index + 1}"))
        self._swanlab.log({"val/generations": texts}, step=step)

    def finish(self, *, is_done: bool = True) -> None:
        self._swanlab.finish(state="success" if is_done else "crashed")

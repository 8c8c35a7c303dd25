"""Restarts of training after the death of a worker: all workers are started again from the newest checkpoint.

A restart is a resume without a new driver. The dead worker's peers are ended, Ray places as many new processes, on a
spare node where the old one is gone, and a new trainer removes what the run has written about the steps that are run
again. Ray, the driver and the graders keep running. The rules are:

- A process that died, or did not answer within ``trainer.worker_timeout_s``, is a fault of a machine: restart.
- An exception in a worker is not: the same step from the same checkpoint raises it again, so the run ends.
- Two deaths in the same step without a new checkpoint in between are no accident either, and end the run too.
- Before the first checkpoint, training starts again from the model's weights.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hf_formats.files import write_text
from verl.single_controller.base.worker_group import WorkerDiedError, WorkerError, WorkerTimeoutError
from verl.single_controller.ray.resources import NoRoomError
from verl.trainer.config import PPOTrainerConfig
from verl.trainer.ppo import checkpointing

if TYPE_CHECKING:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

logger = logging.getLogger(__name__)

RECORD = "restarts.jsonl"


class TrainingStoppedError(RuntimeError):
    """Training ended in ``step`` because of its workers; the text says why it is not restarted."""

    def __init__(self, step: int, why: str) -> None:
        super().__init__(why)
        self.step = step


NewTrainer = Callable[[PPOTrainerConfig, Mapping[str, float]], "RayPPOTrainer"]


def fit_with_restarts(config: PPOTrainerConfig, new_trainer: NewTrainer) -> None:
    """Trains to the end, with as many trainers as necessary.

    Args:
        new_trainer: makes a trainer from the config to resume with and from metrics that it logs with every step.

    Raises:
        TrainingStoppedError: a worker raised, or died in a way that another restart would not repair.
        ValueError: a problem that the user can fix; nothing was trained.
    """
    limit = RestartLimit(config.trainer.max_restarts)
    candidates = RestartPoints(config)
    record = RestartRecord(config.trainer.report_dir)
    num_restarts, failed_at_s, step = 0, 0.0, 0
    while True:
        trainer = new_trainer(config, {"perf/restarts": float(record.count)})
        try:
            trainer.init_workers()
            if num_restarts:
                logger.info("workers are running again %.1f s after the failure", time.monotonic() - failed_at_s)
            trainer.fit()
            return
        except (WorkerDiedError, WorkerTimeoutError) as error:
            failed_at_s, cause = time.monotonic(), str(error)
        except WorkerError as error:
            raise TrainingStoppedError(trainer.global_step, str(error)) from error
        except NoRoomError as error:
            if not num_restarts:
                raise
            raise TrainingStoppedError(step, f"its workers cannot be started again: {error}") from error
        finally:
            trainer.shutdown()
        step, newest = trainer.global_step, candidates.newest()
        from_step = 0 if newest is None else newest.step
        refusal = limit.refusal(step, from_step)
        if refusal is not None:
            raise TrainingStoppedError(step, f"{cause}{refusal}")
        num_restarts += 1
        logger.warning("restart %d, because step %d failed: %s", num_restarts, step, cause)
        logger.warning("going back to %s", "the model's weights" if newest is None else newest.directory)
        record.add(step, from_step, cause)
        config = candidates.resuming(config)


class RestartLimit:
    """Distinguishes accidents from a crash loop; a checkpoint newer than at the previous failure clears the count.

    Args:
        max_restarts: ``trainer.max_restarts``.
    """

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._checkpoint_step = 0
        self._failed_steps: list[int] = []  # since the newest checkpoint

    def refusal(self, step: int, checkpoint_step: int) -> str | None:
        """Returns why a failure in ``step`` ends the run, as the end of a message; None when it may be restarted.

        Args:
            checkpoint_step: the step of the newest checkpoint, 0 when there is none.
        """
        if self._max_restarts == 0:
            return ""
        if checkpoint_step > self._checkpoint_step:
            self._checkpoint_step, self._failed_steps = checkpoint_step, []
        is_repeated = step in self._failed_steps
        self._failed_steps.append(step)
        if is_repeated:
            where = f"in step {step}" if step else "before its first step"
            return f"\nworkers died twice {where} without a new checkpoint in between: that is no accident, so it ends"
        if len(self._failed_steps) > self._max_restarts:
            return (
                f"\nworkers died {len(self._failed_steps)} times without a new checkpoint in between, in steps "
                f"{self._failed_steps}; trainer.max_restarts is {self._max_restarts}"
            )
        return None


class RestartPoints:
    """The checkpoints from which a run may restart.

    The folder of a run that started at ``resume_from_path`` may hold later checkpoints of another training, so only
    those that were written since the start count. Otherwise the newest complete one is used, as for a resume.
    """

    def __init__(self, config: PPOTrainerConfig) -> None:
        trainer = config.trainer
        self._root = trainer.default_local_dir
        self._start: checkpointing.Checkpoint | None = None
        self._earlier: dict[Path, int | None] = {}
        if trainer.resume_mode == "resume_path":
            self._start = checkpointing.Checkpoint(Path(str(trainer.resume_from_path)))
            self._earlier = {found.directory: _written_ns(found) for found in checkpointing.checkpoints(self._root)}

    def newest(self) -> checkpointing.Checkpoint | None:
        """The newest complete one, None before the first."""
        for checkpoint in checkpointing.complete_checkpoints(self._root):
            if self._earlier.get(checkpoint.directory) != _written_ns(checkpoint):
                return checkpoint
        return self._start

    def resuming(self, config: PPOTrainerConfig) -> PPOTrainerConfig:
        """``config`` for the next trainer; it skips damaged checkpoints unless a path was requested."""
        if self._start is None:
            return replace(config, trainer=replace(config.trainer, resume_mode="auto"))
        newest = self.newest()
        assert newest is not None
        return replace(config, trainer=replace(config.trainer, resume_from_path=str(newest.directory)))


class RestartRecord:
    """``restarts.jsonl``: a line per restart of the run, by any of its drivers.

    ``time`` is in seconds since 1970, ``step`` is the step that failed, ``from_step`` that of the checkpoint (0: the
    model's weights), ``cause`` a sentence.
    """

    def __init__(self, report_dir: str) -> None:
        self._path = Path(report_dir) / RECORD
        self._text = self._path.read_text(encoding="utf-8") if self._path.is_file() else ""

    @property
    def count(self) -> int:
        return len(self._text.splitlines())

    def add(self, step: int, from_step: int, cause: str) -> None:
        """Adds a restart; it is on disk when this returns."""
        line = {"time": round(time.time(), 3), "step": step, "from_step": from_step, "cause": cause}
        self._text += json.dumps(line) + "\n"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self._path, self._text)


def _written_ns(checkpoint: checkpointing.Checkpoint) -> int | None:
    """The time of the trainer's file, which each save replaces; None when there is none."""
    path = checkpoint.state_path
    return path.stat().st_mtime_ns if path.is_file() else None

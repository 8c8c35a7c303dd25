"""When a run's checkpoints are saved, published and loaded; ``checkpointing`` has what they are on disk."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_formats.files import write_text
from verl.trainer.config import TrainerConfig
from verl.trainer.ppo import checkpointing
from verl.trainer.ppo.kl import AdaptiveKLController, FixedKLController
from verl.trainer.ppo.learning import LearningObserver
from verl.trainer.ppo.metric_utils import marked_timer
from verl.trainer.ppo.run_changes import record_changes

logger = logging.getLogger(__name__)

_LEARNING, _SIGNS = "learning", "signs.json"  # key of the state; a file of its own, as a part of a run has others


class RunCheckpoints:
    """The checkpoints of one run: the state of its workers, its source of samples, its KL controller and its signs.

    Args:
        signs: the observer of the signs of not learning.
        learning: what the run learns from (``learning_settings``).
    """

    def __init__(
        self,
        config: TrainerConfig,
        load_contents: Sequence[str],
        workers: Any,
        source: Any,
        kl_ctrl: AdaptiveKLController | FixedKLController,
        signs: LearningObserver,
        learning: dict[str, Any],
    ) -> None:
        self.config, self.load_contents = config, load_contents
        self.workers, self.source, self.kl_ctrl, self.signs, self.learning = workers, source, kl_ctrl, signs, learning
        self._unpublished: checkpointing.Checkpoint | None = None
        self._last_save: dict[str, float] = {}

    def save(self, step: int, timing: dict[str, float]) -> None:
        """Writes the trainer's state, then the workers', then ``latest``: what ``latest`` names is always complete.

        With ``actor.checkpoint.async_save`` the workers return early, and ``latest`` follows when they are done.
        """
        root = self.config.default_local_dir
        checkpoint = checkpointing.checkpoint_at(root, step)
        with marked_timer("save_checkpoint", timing):
            self.publish(waits=True)
            state, arrays = self.source.state()
            checkpoint.write_state(state | {"kl_coef": self.kl_ctrl.value, _LEARNING: self.learning}, arrays)
            write_text(checkpoint.directory / _SIGNS, json.dumps(self.signs.state()))
            latest_path = checkpointing.latest_path(root).absolute()
            self.workers.save_checkpoint(
                str(checkpoint.actor.absolute()), global_step=step, latest_path=str(latest_path)
            )
            self._unpublished = checkpoint
            self.publish(waits=False)
        self._last_save = {"timing_s/save_checkpoint": timing["save_checkpoint"]}

    def publish(self, *, waits: bool) -> None:
        """Points ``latest`` at the last checkpoint if it is complete, and removes older ones; may wait until it is."""
        checkpoint = self._unpublished
        if checkpoint is None:
            return
        if not checkpoint.is_complete:
            if not waits:
                return
            self.workers.wait_for_checkpoint()
        config = self.config
        checkpointing.publish(
            config.default_local_dir, checkpoint, config.max_actor_ckpt_to_keep, config.keep_every_steps
        )
        self._unpublished = None

    def load(self) -> int:
        """Loads the newest complete checkpoint, or the requested one, and returns its step; 0 when there is none."""
        config = self.config
        if config.resume_mode == "disable":
            return 0
        if config.resume_mode == "resume_path":
            if problem := checkpointing.resume_problem(str(config.resume_from_path)):
                raise ValueError(problem)
            checkpoint = checkpointing.Checkpoint(Path(str(config.resume_from_path)).expanduser())
            if problems := self._problems_of(checkpoint):
                raise ValueError(f"trainer.resume_from_path: {checkpoint.directory}: {'; '.join(problems)}")
        else:
            found = checkpointing.find_latest_ckpt_path(config.default_local_dir, self._problems_of)
            if found is None:
                logger.info("no checkpoint in %s: starting from the model's weights", config.default_local_dir)
                return 0
            checkpoint = found
        checkpoint.check_contents(self.load_contents)
        state, arrays = checkpoint.read_state()
        self.source.load_state(state, arrays, checkpoint.step)
        self.kl_ctrl.value = state["kl_coef"]
        signs = checkpoint.directory / _SIGNS  # after the source, which grades its groups again
        self.signs.load_state(json.loads(signs.read_text()) if signs.is_file() else {})
        self.workers.load_checkpoint(str(checkpoint.actor.absolute()))
        logger.info("resumed after step %d from %s", checkpoint.step, checkpoint.directory)
        record_changes(config.report_dir, checkpoint.step, state.get(_LEARNING, {}), self.learning)
        for name, what in (("optimizer", "the optimizer's moments start"), ("extra", "learning rate and seeds start")):
            if name not in self.load_contents:
                logger.warning("%s anew: actor.checkpoint.load_contents has no %s", what, name)
        return checkpoint.step

    def take_timing(self) -> dict[str, float]:
        """Returns once the seconds of the last save, which came after its own step had been logged."""
        taken, self._last_save = self._last_save, {}
        return taken

    def _problems_of(self, checkpoint: checkpointing.Checkpoint) -> list[str]:
        found: list[str] = self.workers.verify_checkpoint(str(checkpoint.actor.absolute()))[0]
        return found

"""A run's checkpoints on disk: where they are, which one is the newest complete one, and which are removed."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_formats.files import try_remove, write_bytes, write_text
from megatron.core.dist_checkpointing import is_complete, restore_interrupted, saved_contents

logger = logging.getLogger(__name__)

LATEST = "latest_checkpointed_iteration.txt"
_TRAINER_STATE, _TRAINER_ARRAYS = "data.json", "data.npz"
_ARRAYS_DIGEST = "arrays_sha256"
_STEP = re.compile(r"global_step_(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """One ``global_step_N`` directory: ``actor/`` by the workers, ``data.json`` and ``data.npz`` by the trainer."""

    directory: Path

    @property
    def step(self) -> int:
        match = _STEP.fullmatch(self.directory.name)
        assert match is not None, self.directory
        return int(match.group(1))

    @property
    def actor(self) -> Path:
        """The workers' part; it exists only when it is complete."""
        return self.directory / "actor"

    @property
    def state_path(self) -> Path:
        return self.directory / _TRAINER_STATE

    @property
    def is_complete(self) -> bool:
        return self.state_path.is_file() and is_complete(self.actor)

    def check_contents(self, wanted: Sequence[str]) -> None:
        """ValueError when a complete checkpoint lacks what ``actor.checkpoint.load_contents`` asks for."""
        held = saved_contents(self.actor)
        if missing := [name for name in wanted if name not in held]:
            kept = [name for name in wanted if name not in missing]
            raise ValueError(
                f"{self.directory} holds {', '.join(held)} and no {', '.join(missing)} "
                "(actor_rollout_ref.actor.checkpoint.save_contents of the run that wrote it): add "
                f"'actor_rollout_ref.actor.checkpoint.load_contents=[{','.join(kept)}]' to go on without"
            )

    def write_state(self, state: dict[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Writes the trainer's part, before the workers'; ``arrays`` go to a separate file, which is written first."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if arrays:
            content = io.BytesIO()
            columns: dict[str, Any] = dict(arrays)
            np.savez(content, **columns)
            write_bytes(self.directory / _TRAINER_ARRAYS, content.getvalue())
            state = state | {_ARRAYS_DIGEST: hashlib.sha256(content.getvalue()).hexdigest()}
        write_text(self.state_path, json.dumps(state))

    def read_state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Reads what ``write_state`` wrote; ValueError when the arrays are missing or damaged."""
        state = json.loads(self.state_path.read_text())
        digest = state.pop(_ARRAYS_DIGEST, None)
        if digest is None:
            return state, {}
        path = self.directory / _TRAINER_ARRAYS
        content = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(content).hexdigest() != digest:
            raise ValueError(f"{path} is missing or damaged: resume from another checkpoint (trainer.resume_mode)")
        with np.load(io.BytesIO(content), allow_pickle=False) as found:
            return state, dict(found)


def checkpoint_at(root: str, step: int) -> Checkpoint:
    """The checkpoint of ``step``, whether it exists or not."""
    return Checkpoint(Path(root) / f"global_step_{step}")


def checkpoints(root: str) -> list[Checkpoint]:
    """Every checkpoint directory under ``root``, complete or not, oldest first."""
    found = [Checkpoint(path) for path in Path(root).glob("global_step_*") if _STEP.fullmatch(path.name)]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def complete_checkpoints(root: str) -> Iterator[Checkpoint]:
    """Complete checkpoints, newest first; incomplete ones are logged and skipped.

    One whose replacement by the same step was killed half-way is given its name back.
    """
    for checkpoint in reversed(checkpoints(root)):
        restore_interrupted(checkpoint.actor)
        if checkpoint.is_complete:
            yield checkpoint
        else:
            logger.warning("%s is incomplete and not used", checkpoint.directory)


def resume_problem(path: str) -> str | None:
    """Why a run cannot be resumed from the folder ``path``, with those beside it that it could be resumed from."""
    directory = Path(path).expanduser()
    named = _STEP.fullmatch(directory.name) is not None
    if named and directory.is_dir():
        restore_interrupted(directory / "actor")
    if named and Checkpoint(directory).is_complete:
        return None
    if not directory.is_dir():
        what = "is not a folder" if directory.exists() else "does not exist"
    else:
        what = "is not complete" if named else "is no folder global_step_N"
    root = directory if not named and checkpoints(str(directory)) else directory.parent
    there = [checkpoint.directory.name for checkpoint in checkpoints(str(root)) if checkpoint.is_complete]
    instead = f"{root} has {', '.join(there)}" if there else f"there is no complete checkpoint in {root}"
    return f"trainer.resume_from_path: {directory} {what}; {instead}"


def find_latest_ckpt_path(root: str, problems_of: Callable[[Checkpoint], list[str]] | None = None) -> Checkpoint | None:
    """The newest complete checkpoint in which ``problems_of``, which reads all of it, finds no damage."""
    for checkpoint in complete_checkpoints(root):
        problems = problems_of(checkpoint) if problems_of is not None else []
        if not problems:
            return checkpoint
        logger.warning("%s is damaged and not used: %s", checkpoint.directory, "; ".join(problems))
    return None


def latest_path(root: str) -> Path:
    """The file that names the newest complete checkpoint's step."""
    return Path(root) / LATEST


def publish(root: str, checkpoint: Checkpoint, max_to_keep: int | None, keep_every_steps: int = 0) -> None:
    """Points ``latest`` at a complete checkpoint, then removes older ones that are incomplete or need not be kept.

    Those of the ``max_to_keep`` newest (None: all) and of steps that ``keep_every_steps`` divides are kept. A kill
    at any point leaves no incomplete checkpoint that looks complete, and the next call removes the rest.
    """
    write_text(latest_path(root), str(checkpoint.step))
    if max_to_keep is None:
        return
    older = [other for other in checkpoints(root) if other.step < checkpoint.step]
    whole, unreadable = [], []
    for other in older:
        try:
            if other.is_complete:
                whole.append(other)
        except OSError as error:  # of the file system, which says nothing about the checkpoint
            logger.warning("%s cannot be read and is left: %s", other.directory, error)
            unreadable.append(other)
    kept = unreadable + whole[max(0, len(whole) - (max_to_keep - 1)) :]
    if keep_every_steps:
        kept += [other for other in whole if other.step % keep_every_steps == 0]
    for other in older:
        if other not in kept:
            _remove(other)


def _remove(checkpoint: Checkpoint) -> None:
    """Removes the state file first: the checkpoint is incomplete from then on, even if the rest is not removed.

    What somebody else reads or protects stays with a warning, and the next ``publish`` tries again.
    """
    if try_remove(checkpoint.state_path):
        try_remove(checkpoint.directory)

"""Which checkpoints of a run stay: the newest few, and those of every so many steps; also when a kill comes between."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.core.dist_checkpointing.manifest import Manifest, record_file, write_manifest
from megatron.core.parallel_layout import ParallelLayout
from verl.trainer.config import load_config, validate_config
from verl.trainer.ppo import checkpointing

# What a removal does to the disk, as Python's audit events name it.
CHANGES = ("os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def _write(root: Path, step: int) -> checkpointing.Checkpoint:
    """A whole checkpoint of one small file."""
    checkpoint = checkpointing.checkpoint_at(str(root), step)
    checkpoint.write_state({"loader": {}, "kl_coef": 0.0})
    checkpoint.actor.mkdir()
    (checkpoint.actor / "weights").write_text(str(step))
    files = {"weights": record_file(checkpoint.actor / "weights")}
    write_manifest(checkpoint.actor, Manifest(ParallelLayout(world_size=1), files))
    return checkpoint


def _steps(root: Path) -> list[int]:
    return [checkpoint.step for checkpoint in checkpointing.checkpoints(str(root))]


@pytest.mark.parametrize(
    ("max_to_keep", "every", "left"),
    [
        (None, 0, list(range(1, 10))),
        (1, 0, [9]),
        (2, 0, [8, 9]),
        (1, 3, [3, 6, 9]),
        (2, 3, [3, 6, 8, 9]),
        (3, 100, [7, 8, 9]),
    ],
)
def test_the_newest_and_those_of_every_so_many_steps_stay(
    tmp_path: Path, max_to_keep: int | None, every: int, left: list[int]
) -> None:
    for step in range(1, 10):
        checkpointing.publish(str(tmp_path), _write(tmp_path, step), max_to_keep, every)
    assert _steps(tmp_path) == left
    assert all(checkpoint.is_complete for checkpoint in checkpointing.checkpoints(str(tmp_path)))


def test_a_broken_one_goes_although_its_step_is_to_be_kept(tmp_path: Path) -> None:
    broken = _write(tmp_path, 3)
    (broken.actor / "weights").unlink()
    checkpointing.publish(str(tmp_path), _write(tmp_path, 4), 1, 3)
    assert _steps(tmp_path) == [4]


def _publish_beside_a_reader(root: Path, checkpoint: checkpointing.Checkpoint) -> None:
    """In a child: whenever a file of step 1 is removed, another one appears, as .nfs files do."""

    def reappear(event: str, arguments: tuple[object, ...]) -> None:
        if event == "os.rmdir" and Path(str(arguments[0])).name == "actor":
            (root / "global_step_1" / "actor" / ".nfs1").touch()

    sys.addaudithook(reappear)
    checkpointing.publish(str(root), checkpoint, 1, 0)


def test_an_old_one_that_somebody_reads_does_not_end_the_run_and_goes_at_a_later_save(tmp_path: Path) -> None:
    _write(tmp_path, 1)
    second = _write(tmp_path, 2)
    child = os.fork()
    if child == 0:
        try:
            _publish_beside_a_reader(tmp_path, second)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert _steps(tmp_path) == [1, 2] and not checkpointing.checkpoint_at(str(tmp_path), 1).is_complete
    assert checkpointing.latest_path(str(tmp_path)).read_text() == "2"
    checkpointing.publish(str(tmp_path), _write(tmp_path, 3), 1, 0)
    assert _steps(tmp_path) == [3]


def _publish_and_die(root: Path, checkpoint: checkpointing.Checkpoint, at_change: int) -> None:
    """In a child: kills itself right before the change of that number."""
    seen = 0

    def count(event: str, _arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event in CHANGES:
            if seen == at_change:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    sys.addaudithook(count)
    checkpointing.publish(str(root), checkpoint, 1, 3)


@pytest.mark.timeout(60)
def test_a_kill_anywhere_between_publishing_and_removal_leaves_whole_ones_and_the_next_run_tidies_up(
    tmp_path: Path,
) -> None:
    """Before the new name of ``latest``, between it and the removal, and after each step of the removal."""
    outcomes = []
    for at_change in range(100):
        root = tmp_path / str(at_change)
        for step in (3, 4, 5):
            _write(root, step)
        checkpointing.write_text(checkpointing.latest_path(str(root)), "4")
        child = os.fork()
        if child == 0:
            _publish_and_die(root, checkpointing.checkpoint_at(str(root), 5), at_change)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        is_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        outcomes.append(is_killed)
        found = checkpointing.find_latest_ckpt_path(str(root))
        assert found is not None and found.step == 5
        latest = checkpointing.checkpoint_at(str(root), int(checkpointing.latest_path(str(root)).read_text()))
        assert latest.is_complete
        for whole in checkpointing.complete_checkpoints(str(root)):  # nothing looks whole that is not
            assert (whole.actor / "weights").read_text() == str(whole.step)
        checkpointing.publish(str(root), _write(root, 6), 1, 3)
        checkpointing.publish(str(root), _write(root, 7), 1, 3)
        assert _steps(root) == [3, 6, 7]
        if not is_killed:
            break
    assert len(outcomes) > 4 and outcomes == [True] * (len(outcomes) - 1) + [False]


def test_values_that_keep_nothing_more_are_problems() -> None:
    def problems(*overrides: str) -> str:
        return "\n".join(validate_config(load_config([f"trainer.{text}" for text in overrides])))

    keeps_two = ("save_freq=10", "max_actor_ckpt_to_keep=2")
    assert "keep_every_steps" not in problems("keep_every_steps=50", *keeps_two)
    assert "is -5; give a number of steps" in problems("keep_every_steps=-5", *keeps_two)
    assert "no checkpoint is ever removed" in problems("keep_every_steps=50", "save_freq=10")
    assert "nothing is saved" in problems("keep_every_steps=50", "max_actor_ckpt_to_keep=2")
    assert "25 is not a multiple of trainer.save_freq 10" in problems("keep_every_steps=25", *keeps_two)


def test_arrays_of_the_trainer_come_back_or_are_told_to_be_damaged(tmp_path: Path) -> None:
    checkpoint = checkpointing.checkpoint_at(str(tmp_path), 3)
    arrays = {"column:input_ids": np.arange(6).reshape(2, 3), "unfinished": np.zeros(0, dtype=np.int64)}
    checkpoint.write_state({"kl_coef": 0.5}, arrays)
    state, found = checkpoint.read_state()
    assert state == {"kl_coef": 0.5} and found.keys() == arrays.keys()
    assert all(np.array_equal(found[name], arrays[name]) for name in arrays)
    path = checkpoint.directory / "data.npz"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="data.npz is missing or damaged"):
        checkpoint.read_state()

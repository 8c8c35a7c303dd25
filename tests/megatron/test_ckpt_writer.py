"""The end of a save: many ranks report by files, a kill may come between any two renames, a writer may be quick."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.planner import SavePlan

from megatron.core.dist_checkpointing import CheckpointSaver, is_complete, load_checkpoint, write_process
from megatron.core.dist_checkpointing.snapshot import Snapshot
from megatron.core.dist_checkpointing.write_process import BackgroundWrite
from megatron.core.dist_checkpointing.writer import RankJob, _publish, _sizes, _wait_for_records
from verl.trainer.ppo import checkpointing


@contextmanager
def other_ranks(folder: Path, num_ranks: int) -> Iterator[None]:
    """A process in which ranks report again and again, as ``write_bytes`` does it: a new file, then its name."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        temporary = [str(folder / f".rank-{rank}.done.tmp") for rank in range(num_ranks)]
        while True:
            for path in temporary:
                os.close(os.open(path, os.O_CREAT))
            for rank, path in enumerate(temporary):
                os.replace(path, folder / f"rank-{rank}.done")
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_names_that_vanish_while_ranks_report_are_no_failure(tmp_path: Path) -> None:
    with other_ranks(tmp_path, 255):
        while not (tmp_path / "rank-254.done").exists():
            time.sleep(0.001)
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            _sizes(tmp_path)
    (tmp_path / "rank-254.done").unlink()
    (tmp_path / ".rank-254.done.tmp").unlink(missing_ok=True)
    (tmp_path / ".rank-253.done.tmp").unlink(missing_ok=True)
    (tmp_path / ".rank-253.done.tmp").symlink_to(tmp_path / "gone")  # always: it is listed and cannot be looked at
    last = threading.Timer(0.05, (tmp_path / "rank-254.done").touch)
    last.start()
    _wait_for_records(tmp_path, 255, stall_timeout_s=20)
    last.join(30)


def test_a_folder_that_is_gone_and_ranks_that_are_silent_are_failures(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        _wait_for_records(tmp_path / "gone", 2, stall_timeout_s=20)
    with pytest.raises(OSError, match=r"ranks \[0, 1\] wrote nothing"):
        _wait_for_records(tmp_path, 2, stall_timeout_s=0.05)


def saved(folder: Path, value: float) -> Path:
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, value)
    CheckpointSaver().save(folder, model, None, None, {}, random_states=False)
    return folder


def value_of(folder: Path) -> float:
    model = torch.nn.Linear(1, 1)
    load_checkpoint(folder, model, None, None, random_states=False)
    return model.weight.item()


def publish_and_die(partial: Path, final: Path, at_rename: int) -> None:
    """In a child that kills itself right before that rename."""
    child = os.fork()
    if child == 0:
        seen = 0

        def count(event: str, _arguments: tuple[object, ...]) -> None:
            nonlocal seen
            if event == "os.rename":
                if seen == at_rename:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += 1

        try:
            sys.addaudithook(count)
            _publish(partial, final)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (-signal.SIGKILL if at_rename < 2 else 0)


@pytest.mark.parametrize(("at_rename", "value"), [(0, 1.0), (1, 2.0), (2, 2.0)])
@pytest.mark.parametrize("is_saved_again", [False, True])
def test_a_kill_between_the_renames_of_a_step_that_is_saved_again_loses_no_checkpoint(
    tmp_path: Path, at_rename: int, value: float, is_saved_again: bool
) -> None:
    checkpoint = checkpointing.checkpoint_at(str(tmp_path), 4)
    checkpoint.write_state({})
    saved(checkpoint.actor, 1.0)
    partial = checkpoint.directory / ".actor.abc.partial"
    os.rename(saved(checkpoint.directory / "other", 2.0), partial)
    publish_and_die(partial, checkpoint.actor, at_rename)
    assert checkpoint.actor.exists() == (at_rename != 1)
    if is_saved_again:  # and is killed before it has written anything
        CheckpointSaver()._new_partial(checkpoint.actor)
        assert is_complete(checkpoint.actor)
    found = checkpointing.find_latest_ckpt_path(str(tmp_path))
    assert found == checkpoint and value_of(checkpoint.actor) == value
    saved(checkpoint.actor, 3.0)
    assert value_of(checkpoint.actor) == 3.0
    assert {path.name for path in checkpoint.directory.iterdir()} == {"actor", "data.json"}


def test_a_path_to_resume_from_is_restored_too(tmp_path: Path) -> None:
    checkpoint = checkpointing.checkpoint_at(str(tmp_path), 4)
    checkpoint.write_state({})
    os.rename(saved(checkpoint.actor, 1.0), checkpoint.directory / ".actor.abc.partial.replaced")
    assert checkpointing.resume_problem(str(checkpoint.directory)) is None
    assert value_of(checkpoint.actor) == 1.0


def test_a_writer_that_reports_before_its_pid_is_read_has_not_been_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are in the pipe when the training process looks at it."""
    monkeypatch.setattr(write_process, "_START", "import os; os.write(1, b'7\\ndone') # {module} {address}")
    job = RankJob(tmp_path / "partial", tmp_path / "final", 0, SavePlan([]), None)
    write = BackgroundWrite(job, Snapshot([torch.ones(2)], job))
    assert write.pid == 7
    write.result()

"""A disk that fills while a command trains: one line names it, the last says how to go on, and that is true."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.jobs import Job, Prepared, assert_same_result
from verl.trainer.ppo.checkpointing import checkpoints

SEEN_S = 300.0
DISK = "1300m"  # the launcher refuses a start with less than 1 GiB free


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path, leave: int) -> Path:
    """Take all but ``leave`` bytes of a disk; returns the file that takes them."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (2**20, 2**12):
            while os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize >= leave + size:
                file.write(bytes(size))
    return ballast


# tests/verl/test_disk_full.py has a driver's part of it
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("leave", [0, 3_000_000], ids=["nothing_can_be_logged", "a_checkpoint_does_not_fit"])
@pytest.mark.parametrize("async_save", [False, True])
def test_a_disk_that_fills(converted: Prepared, uninterrupted: Job, disk: Path, leave: int, async_save: bool) -> None:
    job = Job(converted, disk, overrides=(f"actor_rollout_ref.actor.checkpoint.async_save={async_save}",))
    keep_all = "trainer.max_actor_ckpt_to_keep=null"
    with job.command("first", keep_all) as command:
        command.wait_for(lambda: command.is_training() and "step 1 |" in command.text(), "step 1", SEEN_S)
        driver = command.find("verl.trainer.main_ppo")
        assert driver is not None
        driver.suspend()  # the steps are short: the run would be over before the disk is full
        ballast = fill(disk, leave)
        driver.resume()
        assert command.wait(SEEN_S) == 1
        assert command.left_behind() == []
        ballast.unlink()
        text = command.text()
    whole = [found.step for found in checkpoints(str(job.output_dir / "checkpoints")) if found.is_complete]
    assert whole == [*range(1, len(whole) + 1)] and len(whole) < job.steps
    assert "Traceback" not in text
    if leave:  # what a command prints is on the same disk
        assert f"error: the disk at {disk} is full" in text and f"{job.output_dir} is on it: make room there" in text
        assert (
            text.strip()
            .splitlines()[-1]
            .startswith(
                f"run the same command again to continue from {job.output_dir}/checkpoints/global_step_{whole[-1]}"
                if whole
                else "no checkpoint was written yet"
            )
        )
    job.finish()
    assert_same_result(job, uninterrupted)

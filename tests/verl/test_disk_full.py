"""A full disk is known by its error, in this process or a worker's text, and its line names the disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.verl.bandit import bandit_config, run_bandit, write_inputs
from verl.single_controller.base.worker_group import WorkerError
from verl.utils.disk_space import disk_full_line, has_full_disk, is_disk_full

FULL = Path("/dev/full")  # every write to it fails as on a full disk


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples/.step_1.jsonl.tmp0", "reward_ledger/.step_1.jsonl.tmp0"])
def test_every_file_of_a_run_tells_of_it(
    local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("hf_formats.files.secrets.token_hex", lambda num_bytes: "0")  # names of temporary files
    write_inputs(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to(FULL)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as caught:
        run_bandit(bandit_config(tmp_path, "trainer.total_training_steps=2", "trainer.log_samples_freq=1"))
    assert is_disk_full(caught.value)


def test_errors_that_come_from_it() -> None:
    assert is_disk_full(OSError(errno.EDQUOT, "quota"))
    assert is_disk_full(WorkerError("rank 1: OSError: could not write: [Errno 28] No space left on device"))
    try:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            raise RuntimeError("unexpected pos 704 vs 598")
    except RuntimeError as error:
        assert is_disk_full(error)
    assert not is_disk_full(OSError(errno.EACCES, "Permission denied"))
    assert not is_disk_full(None)


def test_the_line_names_the_disk(tmp_path: Path) -> None:
    line = disk_full_line([tmp_path / "not" / "yet" / "there"])
    assert f"{tmp_path} is on it: make room there" in line and "max_actor_ckpt_to_keep" in line
    mount = Path(line.removeprefix("the disk at ").split(" is full (")[0])
    assert mount.is_mount() and tmp_path.is_relative_to(mount)
    assert not has_full_disk([tmp_path])

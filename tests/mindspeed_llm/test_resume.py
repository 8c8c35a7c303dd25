"""A conversion that is killed, or meets a full disk, goes on to the bytes of an unbroken one."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mindspeed_llm import convert_ckpt_deepseek3, convert_ckpt_torch_dist
from mindspeed_llm.cli_io import MANIFEST_NAME
from mindspeed_llm.conversion.engine import partial_directory
from mindspeed_llm.conversion.manifest import JOURNAL_NAME
from tests.mindspeed_llm.test_conversion import assert_same_bytes
from tests.mindspeed_llm.tiny import tiny_hf_config, write_tiny_checkpoint

CONFIG = tiny_hf_config(hidden_size=128, moe_intermediate_size=128, num_hidden_layers=4)
FLAGS = [
    *("--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2"),
    *("--target-expert-parallel-size", "4", "--moe-grouped-gemm", "--moe-tp-extend-ep"),
]
NUM_FILES = 16
COMMANDS = {
    "mp_rank": (convert_ckpt_deepseek3.main, FLAGS),
    "torch_dist": (convert_ckpt_torch_dist.main, ["--num-files", str(NUM_FILES)]),
}


def convert(root: Path, name: str, *flags: str, kind: str = "mp_rank") -> int:
    main, own_flags = COMMANDS[kind]
    return main(["--load-dir", str(root / "hf"), "--save-dir", str(root / name), *own_flags, *flags])


def run(root: Path, flags: list[str], kind: str = "mp_rank") -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    sys.exit(convert(root, "out", *flags, kind=kind))


def journaled(building: Path) -> set[str]:
    journal = building / JOURNAL_NAME
    lines = journal.read_bytes().split(b"\n")[1:-1] if journal.exists() else []
    return {json.loads(line)["file"] for line in lines}


def written(building: Path) -> dict[str, int]:
    """File -> the moment at which it was written, of those that stand under their names."""
    files = (path for path in building.rglob("*") if path.suffix in (".pt", ".distcp"))
    return {str(path.relative_to(building)): path.stat().st_mtime_ns for path in files}


def kill_at_random_moments(root: Path, num_kills: int, num_workers: int, kind: str) -> int:
    """Kill that many runs, each going on from the one before; returns how many files the kills made to be repeated."""
    write_tiny_checkpoint(root / "hf", CONFIG)
    start = time.monotonic()
    assert convert(root, "unbroken", kind=kind) == 0
    duration_s = time.monotonic() - start
    context = multiprocessing.get_context("forkserver")
    rng, output, kills, repeated = random.Random(0), root / "out", 0, 0
    building = partial_directory(output)
    while kills < num_kills:
        before, done = written(building), journaled(building)
        process = context.Process(target=run, args=(root, ["--resume", "--workers", str(num_workers)], kind))
        process.start()
        seen, deadline = len(done), time.monotonic() + 60
        is_in_writing = rng.random() < 0.6  # else at any moment, most of which are in reading and checking
        while is_in_writing and process.is_alive() and len(journaled(building)) <= seen and time.monotonic() < deadline:
            time.sleep(0.002)  # a run's first file says that it has begun to write
        time.sleep(rng.uniform(0, duration_s / 4 if is_in_writing else duration_s))
        process.kill()
        process.join(30)
        assert process.exitcode in (0, -signal.SIGKILL)
        kills += process.exitcode != 0
        if building.exists():
            after = written(building)
            assert all(after[file] == before[file] for file in done), "a finished file was written again"
            is_whole = (building / MANIFEST_NAME).exists()  # only the name was left to be given
            lost = set() if is_whole else set(after) - journaled(building)
            assert len(lost) <= num_workers, "more than the work in hand is repeated"
            repeated += len(lost)
        elif output.exists():
            assert_same_bytes(output, root / "unbroken")
            shutil.rmtree(output)
    assert convert(root, "out", "--resume", "--workers", "1", kind=kind) == 0
    assert_same_bytes(output, root / "unbroken")
    assert sorted(path.name for path in root.iterdir()) == ["hf", "out", "unbroken"]
    return repeated


@pytest.mark.parametrize(("num_kills", "kind"), [(6, "mp_rank"), (3, "torch_dist")])
def test_killed_runs_go_on_to_the_same_bytes(num_kills: int, kind: str, tmp_path: Path) -> None:
    kill_at_random_moments(tmp_path, num_kills, num_workers=1, kind=kind)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", COMMANDS)
@pytest.mark.parametrize(("num_kills", "num_workers"), [(100, 1), (20, 2)])
def test_a_hundred_kills(num_kills: int, num_workers: int, kind: str, tmp_path: Path) -> None:
    kill_at_random_moments(tmp_path, num_kills, num_workers, kind)


@pytest.mark.parametrize("has_journal", [False, True])
def test_a_cut_at_the_last_moments_is_gone_on_with(has_journal: bool, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "hf", CONFIG)
    assert convert(tmp_path, "unbroken") == 0
    building = partial_directory(tmp_path / "out")
    shutil.copytree(tmp_path / "unbroken", building)  # all is there but the name
    if has_journal:
        (building / JOURNAL_NAME).touch()  # cut between the manifest and the end of the journal
    assert convert(tmp_path, "out", "--resume") == 0
    assert_same_bytes(tmp_path / "out", tmp_path / "unbroken")


def test_a_torn_journal_line_and_a_lost_file_are_made_again(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "hf", CONFIG)
    assert convert(tmp_path, "unbroken") == 0
    building = partial_directory(tmp_path / "out")
    process = multiprocessing.get_context("forkserver").Process(target=run, args=(tmp_path, []))
    process.start()
    while len(journaled(building)) < 3:
        assert process.is_alive()
        time.sleep(0.002)
    process.kill()
    process.join(30)
    journal = building / JOURNAL_NAME
    os.truncate(journal, journal.stat().st_size - 10)
    next(iter(building.rglob("*.pt"))).unlink()
    assert convert(tmp_path, "out", "--resume") == 0
    assert_same_bytes(tmp_path / "out", tmp_path / "unbroken")


def test_other_input_or_another_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_checkpoint(tmp_path / "hf", CONFIG)
    building = partial_directory(tmp_path / "out")
    process = multiprocessing.get_context("forkserver").Process(target=run, args=(tmp_path, []))
    process.start()
    while not journaled(building):
        time.sleep(0.002)
    os.kill(process.pid or 0, signal.SIGSTOP)
    assert convert(tmp_path, "out", "--resume") == 1
    assert "another run is writing" in capsys.readouterr().err
    process.kill()
    process.join(30)
    write_tiny_checkpoint(tmp_path / "hf", CONFIG, seed=1)
    assert convert(tmp_path, "out", "--resume") == 1
    assert "unfinished output of other input" in capsys.readouterr().err
    shutil.rmtree(building)
    (building / "mine").mkdir(parents=True)
    assert convert(tmp_path, "out", "--resume") == 1
    assert "was not left by a conversion" in capsys.readouterr().err


def test_a_full_disk_stops_it_cleanly(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "hf", CONFIG)
    assert convert(tmp_path, "unbroken") == 0
    disk, out = tmp_path / "disk", tmp_path / "disk" / "out"
    disk.mkdir()
    num_bytes = sum(path.stat().st_size for path in (tmp_path / "unbroken").rglob("*") if path.is_file())
    mount = ["mount", "-t", "tmpfs", "-o", f"size={2 * num_bytes}", "none", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a disk that is small can be mounted by root only")
    try:
        process = multiprocessing.get_context("forkserver").Process(target=run_aside, args=(tmp_path, out))
        process.start()
        while not journaled(partial_directory(out)):
            time.sleep(0.001)
        os.kill(process.pid or 0, signal.SIGSTOP)
        left = shutil.disk_usage(disk).free
        (disk / "ballast").write_bytes(bytes(left - left % 4096))
        os.kill(process.pid or 0, signal.SIGCONT)
        process.join(30)
        assert process.exitcode == 1
        assert "run the same command with --resume" in (tmp_path / "stderr").read_text()
        kept = journaled(partial_directory(out))
        assert 0 < len(kept) < NUM_FILES
        assert not list(partial_directory(out).rglob("*.tmp"))
        (disk / "ballast").unlink()
        before = written(partial_directory(out))
        assert convert(tmp_path, "disk/out", "--resume") == 0
        assert_same_bytes(out, tmp_path / "unbroken")
        assert all(written(out)[file] == before[file] for file in kept)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def run_aside(root: Path, output: Path) -> None:
    os.dup2(os.open(root / "stderr", os.O_WRONLY | os.O_CREAT), 2)
    sys.exit(convert(root, str(output)))

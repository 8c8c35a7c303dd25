"""Saves in the background: what they hold, that they free what they took, how they fail, and what they survive."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from megatron.core.dist_checkpointing import CheckpointSaver, is_complete, load_checkpoint
from megatron.core.dist_checkpointing.save_plan import OwnedChunks, TensorChunks, coverage_problems, make_global_plan
from megatron.core.dist_checkpointing.snapshot import Snapshot, read_snapshot
from megatron.core.dist_checkpointing.writer import remove_partials
from megatron.core.parallel_state import destroy_model_parallel, initialize_model_parallel
from tests.parallel.launcher import run_ranks

_NUM_BYTES = 1 << 24


class _Weight(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((_NUM_BYTES // 4,), value))


def _saved_value(directory: Path) -> float:
    model = _Weight(0.0)
    load_checkpoint(directory, model, None, None, verify_digests=True)
    assert torch.equal(model.weight, model.weight[:1].expand_as(model.weight))
    return model.weight[0].item()


def _maps_of(pid: str) -> str:
    path = Path(f"/proc/{pid}/maps")
    return path.read_text() if path.exists() else ""


def _holds_snapshot() -> bool:
    """Whether this process has a snapshot's memory mapped or its file open."""
    files = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    return any("memfd:checkpoint" in text for text in [*files, _maps_of("self")])


def test_what_is_saved_is_the_state_at_the_call_and_its_copy_is_freed(tmp_path: Path) -> None:
    saver, latest = CheckpointSaver(), tmp_path / "latest.txt"
    model = _Weight(1.0)
    begin = time.monotonic()
    saver.save(tmp_path / "step_1", model, None, None, {}, async_save=True, latest=(str(latest), "1"))
    in_call_s = time.monotonic() - begin
    with torch.no_grad():
        model.weight.fill_(2.0)
    assert not is_complete(tmp_path / "step_1") and not latest.exists()
    assert _NUM_BYTES < saver.snapshot_bytes < 1.01 * _NUM_BYTES
    assert not _holds_snapshot()  # the writer has it now
    saver.check()
    assert saver.running is not None
    pid = saver.running.pid
    saver.wait()
    assert time.monotonic() - begin > 2 * in_call_s
    while _maps_of(str(pid)):
        time.sleep(0.01)
    assert latest.read_text() == "1" and _saved_value(tmp_path / "step_1") == 1.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.txt", "step_1"]

    saver.save(tmp_path / "step_2", model, None, None, {}, latest=(str(latest), "2"))  # the same, waited for
    assert latest.read_text() == "2" and _saved_value(tmp_path / "step_2") == 2.0


def _save_and_die(directory: Path) -> None:
    CheckpointSaver().save(directory, _Weight(3.0), None, None, {}, async_save=True)
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_writer_finishes_what_a_killed_process_began(tmp_path: Path) -> None:
    training = multiprocessing.get_context("forkserver").Process(target=_save_and_die, args=(tmp_path / "step_3",))
    training.start()
    training.join(120)
    assert training.exitcode == -signal.SIGKILL
    while not is_complete(tmp_path / "step_3"):
        assert any(tmp_path.iterdir()), "the save was given up"
        time.sleep(0.05)
    assert _saved_value(tmp_path / "step_3") == 3.0


def test_a_writer_whose_files_another_run_removes_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that starts again saves the step that the writer of the killed run still writes."""
    write_data = dcp.FileSystemWriter.write_data

    def written_and_removed(writer: Any, *arguments: Any) -> Any:
        future = write_data(writer, *arguments)
        for path in tmp_path.glob(".step_1.*.partial/*.distcp"):
            path.unlink()
        return future

    with monkeypatch.context() as patched:
        patched.setattr(dcp.FileSystemWriter, "write_data", written_and_removed)
        with pytest.raises(OSError, match="No such file"):
            CheckpointSaver().save(tmp_path / "step_1", _Weight(1.0), None, None, {})
    assert not list(tmp_path.iterdir())


def test_what_a_writer_adds_to_a_removed_save_goes_nowhere(tmp_path: Path) -> None:
    left, stop, ended = tmp_path / ".step_1.0123456789ab.partial", threading.Event(), threading.Event()
    left.mkdir()
    for number in range(100):
        (left / f"__{number}_0.distcp").touch()

    def add() -> None:
        number = 0
        with contextlib.suppress(FileNotFoundError):
            while not stop.is_set():
                (left / f"rank-{number}.done").touch()
                number += 1
        ended.set()

    writer = threading.Thread(target=add)
    writer.start()
    try:
        remove_partials(tmp_path / "step_1")
        assert ended.wait(10) and not left.exists()
    finally:
        stop.set()
        writer.join()
    remove_partials(tmp_path / "step_1")
    assert not list(tmp_path.iterdir())


def _fail_and_go_on(root: str) -> str:
    """Rank 1's writer dies: it hears of it at its next step, rank 0 at its own; the next save works."""
    groups = initialize_model_parallel()
    saver, model = CheckpointSaver(groups), _Weight(1.0)
    saver.save(Path(root) / "step_1", model, None, None, {}, async_save=True)
    assert saver.running is not None
    if groups.rank == 1:
        os.kill(saver.running.pid, signal.SIGKILL)
    while True:
        try:
            saver.check()
        except OSError as error:
            told = str(error)
            break
        time.sleep(0.02)
    with pytest.raises(
        OSError, match=r"rank 0: .*rank 1: .*was killed"
    ):  # on both ranks, at the next save or at the end
        saver.wait()
    assert not (Path(root) / "step_1").exists()
    saver.save(Path(root) / "step_1", model, None, None, {})
    assert is_complete(Path(root) / "step_1", verify_digests=True)
    dist.barrier()
    assert [path.name for path in Path(root).iterdir()] == ["step_1"]
    destroy_model_parallel()
    return told


def test_a_writer_that_dies_is_an_error_at_the_next_step_and_on_all_ranks(tmp_path: Path) -> None:
    told = run_ranks(_fail_and_go_on, 2, str(tmp_path))
    assert "its writer was killed" in told[1]
    assert "rank-1: its writer was killed" in told[0]


def test_a_snapshot_holds_any_tensor(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(4, 6)
    tensors = [whole.t(), whole[1:3, 2:4], torch.tensor(7, dtype=torch.int64), whole.bfloat16(), torch.empty(0, 3)]
    snapshot = Snapshot(tensors, {"plan": 1})
    address = snapshot.address.split(":")
    copies, description = read_snapshot(":".join([str(os.dup(snapshot.handle)), *address[1:]]))
    snapshot.close()
    assert description == {"plan": 1}
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True))


def test_gaps_and_overlaps_are_found_before_anything_is_written() -> None:
    left, right, middle = ((0, 0), (4, 2)), ((0, 2), (4, 2)), ((1, 1), (2, 2))
    assert coverage_problems("w", (4, 4), [right, left]) == []
    assert coverage_problems("w", (), [((), ())]) == []
    assert coverage_problems("w", (4, 4), [left]) == ["w: 8 of 16 elements are held by a rank"]
    assert "overlap" in coverage_problems("w", (4, 4), [left, middle, right])[0]
    assert "outside" in coverage_problems("w", (3, 4), [left, right])[0]

    def owned(*chunks: tuple[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype = torch.float32) -> OwnedChunks:
        return {"w": TensorChunks(dtype, (4, 4), chunks)}

    plan = make_global_plan([owned(left, right), owned(right), owned(left)])
    assert sorted(item for own in plan.chunks_of_rank for item in own) == [("w", 0), ("w", 1)]
    with pytest.raises(ValueError, match=r"w: 8 of 16 elements"):
        make_global_plan([owned(left), owned(left)])
    with pytest.raises(ValueError, match=r"w is torch.float32 \(4, 4\) on one rank, torch.float16 \(4, 4\) on 1"):
        make_global_plan([owned(left), owned(right, dtype=torch.float16)])

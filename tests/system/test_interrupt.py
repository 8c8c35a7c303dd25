"""Ctrl-C and SIGTERM on the user's command: the step is saved, the last line says how to go on, and that is true."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.system.command import Command
from tests.system.jobs import Job, Prepared, assert_same_result

SEEN_S = 300.0


# tests/verl/test_stop_request.py interrupts a driver
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_saves_its_step_and_goes_on(
    converted: Prepared, uninterrupted: Job, tmp_path: Path, number: signal.Signals
) -> None:
    job = Job(converted, tmp_path)
    with job.command("first", "trainer.save_freq=-1") as command:
        command.wait_for(lambda: command.is_training() and "step 1 |" in command.text(), "step 1", SEEN_S)
        script = command.find("tools.launch")
        assert script is not None
        for _ in range(2):  # a terminal's Ctrl-C reaches the launcher, and again from the script that waits for it
            script.send_signal(number)
        assert command.wait(SEEN_S) == 128 + number
        assert command.left_behind() == []
        step = job.newest_step
        assert 1 < step < 4
        *_, last = command.text().strip().splitlines()
        kept = f"{job.output_dir}/checkpoints/global_step_{step}"
        assert last == f"run the same command again to continue from {kept}, which is kept"
    job.finish()
    assert_same_result(job, uninterrupted)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_before_anything_starts_one_signal_is_enough(
    prepared: Prepared, tmp_path: Path, number: signal.Signals
) -> None:
    """While the launcher still loads modules and checks; the shell has started it with SIGINT ignored."""
    environment = prepared.environment(tmp_path / "run")
    with Command(tmp_path / "output.log", environment) as command:
        script = command.wait_for(lambda: command.find("tools.launch"), "launcher", SEEN_S)
        command.wait_for(lambda: _hears_interrupts(script.pid), "launcher that loads", SEEN_S)
        script.send_signal(number)
        assert command.wait(SEEN_S) == 128 + number
        assert "Traceback" not in command.text() and command.left_behind() == []
    assert not (tmp_path / "run").exists()


def _hears_interrupts(pid: int) -> bool:
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return caught is not None and bool(int(caught[1], 16) & 1 << (signal.SIGINT - 1))

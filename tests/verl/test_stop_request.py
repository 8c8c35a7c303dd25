"""Ctrl-C during training: the step is finished and saved, a resume equals never stopped, a second one ends at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.verl.bandit import bandit_config, run_bandit, write_inputs
from verl.trainer.main_ppo import how_to_continue
from verl.trainer.ppo.checkpointing import checkpoints
from verl.trainer.ppo.observers import StepObserver
from verl.trainer.ppo.stop_request import StopRequest, TrainingInterruptedError

CLOCKS = ("timing", "perf/time_per_step", "perf/throughput", "perf/cpu_memory")
# The process says who it is, prints the request and sleeps; the prctl call is that of a launcher's child.
LISTENER = """
import ctypes, signal, sys, time
from verl.trainer.ppo.stop_request import StopRequest
if sys.argv[1] == "child":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
request = StopRequest()
request.has_steps = sys.argv[2:] != ["early"]
with request.listen():
    print("listening", flush=True)
    while not request.is_made:
        time.sleep(0.01)
    print("asked", flush=True)
    time.sleep(60)
"""


class CtrlC(StepObserver):
    """Sends this process what a terminal sends, within ``step``."""

    def __init__(self, step: int) -> None:
        self.step = step

    def before_step(self, number: int) -> None:
        if number == self.step:
            os.kill(os.getpid(), signal.SIGINT)


def _run(root: Path, *overrides: str, interrupted_in: int = 0) -> list[dict[str, Any]]:
    request = StopRequest()
    with request.listen():
        run_bandit(bandit_config(root, "trainer.test_freq=-1", *overrides), [CtrlC(interrupted_in)], request)
    lines = (root / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(CLOCKS)} for line in lines]


@pytest.mark.timeout(240)
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(local_ray: None, tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for root in (whole, stopped):
        root.mkdir()
        write_inputs(root)
    steps = ("trainer.total_training_steps=5", "trainer.save_freq=-1")
    expected = _run(whole, *steps)
    with pytest.raises(TrainingInterruptedError, match="stopped after step 2"):
        _run(stopped, *steps, interrupted_in=2)
    (kept,) = checkpoints(str(stopped / "checkpoints"))
    assert kept.step == 2 and kept.is_complete
    assert f"continue from {kept.directory}, which is kept" in how_to_continue(str(stopped / "checkpoints"))
    assert _run(stopped, *steps) == expected


@pytest.mark.parametrize("kind", ["shell", "child"])
def test_the_second_signal_ends_at_once(kind: str) -> None:
    with subprocess.Popen([sys.executable, "-c", LISTENER, kind], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "asked\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 128 + signal.SIGINT


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_before_the_first_step_one_signal_is_enough(number: signal.Signals) -> None:
    command = [sys.executable, "-c", LISTENER, "shell", "early"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        process.send_signal(number)
        assert process.wait(timeout=30) == 128 + number


def test_the_end_of_the_launcher_is_no_request() -> None:
    """Its child is signalled by the kernel and ends at once, whatever step it is in."""
    parent = (
        f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {LISTENER!r}, 'child'])\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        process.kill()
        started = time.monotonic()
        assert process.stdout.read() == ""  # until the child, which has the other end, is gone
        assert time.monotonic() - started < 30

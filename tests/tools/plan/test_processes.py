"""A plan in a plain shell: it ends without the variables that the tests' own run sets, and leaves no process behind."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.mindspeed_llm.tiny import tiny_hf_config

ROOT = Path(__file__).parents[3]
OF_TEST_RUNS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCH_DEVICE_BACKEND_AUTOLOAD", "RAY_enable_worker_prestart")
ENGINE = "actor_rollout_ref.actor.megatron"


THREADED = """import signal, sys, torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it
torch.ones(1 << 22).exp_()  # torch's threads exist before the planner starts its processes
from tools.plan.__main__ import main
sys.exit(main(sys.argv[1:]))"""


COMPUTES = """import sys, torch
from mindspeed_llm.conversion.pool import run_tasks
def work(task, report):
    return float(torch.ones(1 << 22).mul_(3).sub_(2).sum())
if __name__ == "__main__":
    work("the parent's threads exist before its workers", print)
    assert dict(run_tasks(work, ["a", "b"], 2, print)) == {"a": 1 << 22, "b": 1 << 22}"""


def in_plain_shell(*arguments: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in OF_TEST_RUNS}
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)}, start_new_session=True,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def started(tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    """The planner on two stages, with so many tokens that torch works on them with all its threads."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_hf_config(num_hidden_layers=4)), encoding="utf-8")
    return in_plain_shell(
        "-c", THREADED, "r1_zero_tiny", "--device", "cpu", "--model", str(tmp_path), *options,
        "trainer.n_gpus_per_node=2", f"{ENGINE}.pipeline_model_parallel_size=2",
        f"{ENGINE}.expert_model_parallel_size=1", "data.train_batch_size=8",
        "data.max_prompt_length=1024", "data.max_response_length=1024",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.n=2",
    )  # fmt: skip


def test_workers_of_a_process_with_threads_compute_in_a_plain_shell(tmp_path: Path) -> None:
    """The planner's pool: a worker that was forked would hang in its first large operation."""
    (tmp_path / "computes.py").write_text(COMPUTES, encoding="utf-8")
    parent = in_plain_shell(str(tmp_path / "computes.py"))
    output, _ = parent.communicate(timeout=100)
    assert parent.returncode == 0, output


@pytest.mark.slow  # the planner's pool does the same in the test above
def test_a_plan_ends_in_a_plain_shell(tmp_path: Path) -> None:
    plan = started(tmp_path, "--output", str(tmp_path / "plan.json"))
    output, _ = plan.communicate(timeout=150)
    assert plan.returncode in (0, 1), output
    assert [stage["stage"] for stage in json.loads((tmp_path / "plan.json").read_text())["stages"]] == [0, 1]


def test_an_interrupt_leaves_no_process(tmp_path: Path) -> None:
    plan = started(tmp_path)
    children: list[psutil.Process] = []
    deadline = time.monotonic() + 100
    while len([child for child in children if "spawn_main" in " ".join(child.cmdline())]) < 2:
        assert plan.poll() is None and time.monotonic() < deadline, "no worker process was seen"
        time.sleep(0.02)
        children = psutil.Process(plan.pid).children(recursive=True)
    os.killpg(plan.pid, signal.SIGINT)  # as a terminal does: the workers get it too
    output, _ = plan.communicate(timeout=60)
    assert plan.returncode == 130, output
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def test_the_first_second(tmp_path: Path) -> None:
    """On a terminal something moves before torch is loaded, and Ctrl-C is heard; a pipe gets a line about it."""
    terminal, end = pty.openpty()
    command = [sys.executable, "-X", "importtime", "-m", "tools.plan", "r1_ascend_671b_256die"]
    with subprocess.Popen(command, cwd=ROOT, stdin=end, stdout=end, stderr=end, start_new_session=True) as plan:
        try:
            os.close(end)
            shown = b""
            while b"planning" not in shown:
                shown += os.read(terminal, 4096)
            assert b"import time:" in shown and not re.search(rb"\| +torch\s", shown.partition(b"planning")[0])
            os.killpg(plan.pid, signal.SIGINT)
            with suppress(OSError):  # of a terminal whose last process has ended
                while os.read(terminal, 4096):
                    pass
            assert plan.wait(timeout=60) == 130
        finally:
            plan.kill()
    os.close(terminal)
    piped = in_plain_shell("-m", "tools.plan", "absent")
    assert piped.communicate(timeout=60)[0].startswith("planning ...\nerror: there is no config 'absent'")


def test_a_wrong_value_is_one_sentence(tmp_path: Path) -> None:
    """Damaged and impossible files, and counts that are none."""
    (tmp_path / "device.toml").write_bytes(bytes(range(128, 256)))
    for arguments, message in (
        (["--device", str(tmp_path / "device.toml")], "device.toml is not TOML"),
        (["--nodes", "0"], "argument --nodes: 0 is below 1"),
        (["--prompt-length", "-5"], "argument --prompt-length: -5 is below 1"),
    ):
        plan = in_plain_shell("-m", "tools.plan", "r1_zero_tiny", *arguments)
        output, _ = plan.communicate(timeout=60)
        assert plan.returncode == 2 and message in output and "Traceback" not in output

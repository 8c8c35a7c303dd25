"""The plan before the run: it is made of what the run would be, refuses what cannot fit, and stops nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.common.recipe import load_recipe
from tests.compiler import needs_compiler
from tools.launch import __main__ as launch
from tools.launch.first_plan import (
    FITS,
    FirstPlan,
    cpu_profile,
    cuda_profile,
    device_profile,
    first_plan,
    npu_profile,
    plan_command,
)
from tools.launch.job import Job, resolve_config
from tools.launch.settings import read_settings
from tools.plan.__main__ import main as plan_main
from tools.plan.devices import GIB, DeviceProfile, load_device

SMALL = (
    "data.max_prompt_length=64",
    "data.max_response_length=16",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.rollout.n=2",
)


def job_of(tmp_path: Path, *overrides: str, **variables: str) -> Job:
    environment = {"OUTPUT_DIR": str(tmp_path / "out"), "CONFIG_NAME": "r1_zero_tiny", **variables}
    settings = read_settings(load_recipe("r1_zero"), overrides, environment)
    return Job(settings, resolve_config(settings))


def assert_fits(summary: str) -> None:
    assert summary.startswith("plan: fits on 2 x CPU core")
    assert "stay free" in summary
    assert "a step is predicted to take" in summary
    assert "\n" not in summary


def test_a_run_that_fits_is_summarised_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The planner's command, run in this process."""
    (scratch := tmp_path / "scratch").mkdir()
    options = ("--brief", "--output", str(scratch / "plan.json"))
    command = plan_command(job_of(tmp_path, *SMALL), scratch, *options)
    assert command[1:3] == ["-m", "tools.plan"]
    assert plan_main(command[3:]) == FITS
    assert_fits(capsys.readouterr().out.splitlines()[0])
    assert json.loads((scratch / "plan.json").read_text())["problems"] == []
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_plan_that_fits_has_no_problem(tmp_path: Path) -> None:
    plan = first_plan(job_of(tmp_path, *SMALL))
    assert plan.problems == ()
    assert_fits(plan.summary)
    assert not (tmp_path / "out").exists()


@needs_compiler
def test_a_run_that_cannot_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small.toml"
    small.write_text(cpu_profile(int(0.05 * GIB), 2), encoding="utf-8")
    monkeypatch.setenv("PLAN_DEVICE", str(small))
    monkeypatch.setenv("OUTPUT_DIR", str(tmp_path / "out"))
    monkeypatch.setenv("CONFIG_NAME", "r1_zero_tiny")
    assert launch.main(["r1_zero", *SMALL]) == launch.BAD_INPUT
    output = capsys.readouterr().out
    assert "plan: does not work" in output
    assert "the run cannot fit (--no-plan starts it all the same)" in output
    assert "GiB" in output
    assert "Nothing was started." in output
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]


def test_what_cannot_be_planned_is_not_refused(tmp_path: Path) -> None:
    unknown = first_plan(job_of(tmp_path, *SMALL, PLAN_DEVICE="abacus"))
    assert unknown.problems == ()
    assert unknown.summary.startswith("no plan: no device 'abacus'; known devices: ")
    assert unknown.summary.endswith("; the run starts without one")
    slow = first_plan(job_of(tmp_path, *SMALL), timeout_s=0.1)
    assert slow == FirstPlan("no plan: the planner took longer than 0.1 s; the run starts without one")


def test_the_command_is_that_of_the_run(tmp_path: Path) -> None:
    job = job_of(tmp_path, *SMALL, "trainer.total_epochs=2", PLAN_DEVICE="h100")
    command = plan_command(job, tmp_path)
    assert command[1:3] == ["-m", "tools.plan"]
    assert Path(command[3]).name == "r1_zero_tiny.yaml"
    assert "trainer.total_epochs=2" in command
    assert command[command.index("--device") + 1] == "h100"
    model = Path(command[command.index("--model") + 1])
    assert (model / "config.json").is_file()
    assert not any(text.startswith("actor_rollout_ref.model.path=") for text in command)


def test_the_device_is_that_of_the_run(tmp_path: Path) -> None:
    here = load_device(device_profile(job_of(tmp_path, "trainer.n_gpus_per_node=3"), tmp_path))
    assert here.family == "cpu"
    assert here.devices_per_node == here.domain_devices == 3
    assert here.memory_gib == pytest.approx(here.host_memory_gib / 3, rel=1e-2)
    die = load_device(device_profile(job_of(tmp_path, "trainer.device=npu"), tmp_path))
    assert (die.name, die.host_memory_gib) == (load_device("a3").name, here.host_memory_gib)


def test_profiles_have_the_nodes_own_memory(tmp_path: Path) -> None:
    for text, name in (
        (npu_profile(8, 512 * GIB), "a2"),
        (npu_profile(16, 512 * GIB), "a3"),
        (npu_profile(0, 512 * GIB), "a3"),
        (cuda_profile("NVIDIA H100 80GB HBM3", 80 * GIB, 512 * GIB), "h100"),
        (cuda_profile("NVIDIA H200", 141 * GIB, 512 * GIB), "h200"),
        (cuda_profile("NVIDIA H20", 96 * GIB, 512 * GIB), "h20"),
        (cuda_profile("NVIDIA GB200", 186 * GIB, 512 * GIB), "gb200"),
    ):
        assert loaded(text, tmp_path) == replace(load_device(name), host_memory_gib=512.0)
    other = loaded(cuda_profile("NVIDIA T4", 15 * GIB, 64 * GIB), tmp_path)
    assert (other.name, other.memory_gib, other.host_memory_gib) == ("NVIDIA T4, timed as an H100", 15, 64)


def loaded(text: str, folder: Path) -> DeviceProfile:
    """The profile in ``text``, read from a file in ``folder``."""
    (folder / "here.toml").write_text(text, encoding="utf-8")
    return load_device(str(folder / "here.toml"))


def test_a_cpu_profile_has_this_machines_memory(tmp_path: Path) -> None:
    given = loaded(cpu_profile(16 * GIB, 4), tmp_path)
    assert (given.memory_gib, given.host_memory_gib, given.devices_per_node) == (4.0, 16.0, 4)
    assert given.domain_link.gbs > 0


def test_a_cpu_profile_has_the_rates_of_a_workers_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rates = {}
    for threads in ("1", "2"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        rates[threads] = loaded(cpu_profile(16 * GIB, 1), tmp_path)
    assert rates["2"].peak_bf16_tflops == 2 * rates["1"].peak_bf16_tflops
    assert rates["1"].hbm_gbs < rates["2"].hbm_gbs <= rates["2"].host_memory_gbs

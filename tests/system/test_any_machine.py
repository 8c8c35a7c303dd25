"""The user's command on people's machines: odd paths, a long TMPDIR, a home that is read-only, two runs at once."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from recipes.common.recipe import ROOT
from tests.system.command import Command, read_metrics
from tests.system.jobs import SMALL, Prepared

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
ODD = "josé's \\ $x ${y} [1],b=c #%"


def cloned(folder: Path) -> Path:
    """A clone of what is committed here; it skips where this is no clone itself."""
    done = subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"git does not clone {ROOT}: {done.stderr.strip()}")
    return folder


def test_two_runs_at_once_from_an_odd_clone_with_a_long_tmpdir(converted: Prepared, tmp_path: Path) -> None:
    """RAY_PORT is not named, so each takes a free one; inputs are reached by links in a folder of the odd name."""
    odd = tmp_path / ODD
    odd.mkdir()
    inputs = {name: odd / Path(path).name for name, path in converted.inputs.items()} | {"MODEL_PATH": odd / "model"}
    for name, link in inputs.items():
        link.symlink_to(converted.model_path if name == "MODEL_PATH" else converted.inputs[name])
    temporary = tmp_path / ("t" * 150)
    temporary.mkdir()
    script = str(cloned(tmp_path / "实验 b" / "clone") / "recipes" / "r1_zero" / "ray_start_grpo_npu.sh")
    own = {"RAY_PORT": "", "TMPDIR": temporary, "STEPS": 1, "SEED": 42, **inputs}
    arguments = ("--no-plan", *converted.arguments)
    core = ("taskset", "-c", str(min(os.sched_getaffinity(0))))
    with (
        Command(tmp_path / "a.log", own | {"OUTPUT_DIR": odd / "run a"}, arguments, core, script=script) as first,
        Command(tmp_path / "b.log", own | {"OUTPUT_DIR": odd / "run b"}, arguments, script=script) as second,
    ):
        for command in (first, second):
            assert command.wait(900.0) == 0, command.tail()
            assert command.left_behind() == []
    assert [len(read_metrics(odd / name)) for name in ("run a", "run b")] == [2, 2]
    assert not [path for path in temporary.iterdir() if path.name.startswith("rl-")]


def test_a_user_whose_home_cannot_be_written(converted: Prepared, tmp_path: Path) -> None:
    """``/proc`` is a home that nobody can write to, root neither."""
    temporary = tmp_path / "t"
    temporary.mkdir()
    environment = converted.environment(tmp_path / "run", HOME="/proc/1", TMPDIR=temporary, STEPS=1)
    with Command(tmp_path / "a.log", environment, ("--no-plan", *SMALL)) as command:
        assert command.wait(900.0) == 0, command.tail()
        assert "the home of this user cannot hold libraries: caches of kernels and the like are in" in command.text()
    assert list((temporary / f"r1-zero-cache-{os.getuid()}" / "r1-zero-ascend").iterdir())

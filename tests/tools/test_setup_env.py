"""The set-up script on a small repository of its own: made once, quick again, never half made."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A repository whose layers are empty, so that no package is fetched."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools/setup_env.sh", tmp_path / "tools")
    (tmp_path / "requirements").mkdir()
    for layer in ("base", "dev", "npu", "cuda", "constraints"):
        (tmp_path / f"requirements/{layer}.txt").write_text("# nothing\n", encoding="utf-8")
    (tmp_path / "requirements/cann82").mkdir()
    for layer in ("base", "npu", "constraints"):
        (tmp_path / f"requirements/cann82/{layer}.txt").write_text("# nothing\n", encoding="utf-8")
    return tmp_path


def wheel_of_torch(folder: Path, cuda: str | None) -> Path:
    """A wheel whose torch knows nothing but the CUDA that it was built for."""
    folder.mkdir()
    path, info = folder / "torch-2.13.0-py3-none-any.whl", "torch-2.13.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("torch/__init__.py", f"class version: cuda = {cuda!r}\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def setup(repo: Path, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("VENV_DIR", "PYTHON", "STACK")}
    return subprocess.run(
        ["bash", "tools/setup_env.sh", *args],
        cwd=repo,
        env={**clean, "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
@pytest.mark.parametrize("is_mended", [False, True])
def test_two_at_once_make_one_environment_that_is_made_again_when_a_pin_changes(repo: Path, is_mended: bool) -> None:
    """An install that fails is not taken for a finished one: nothing says that it is, and it is made anew."""
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: setup(repo, "dev"), range(2)))
    assert [done.returncode for done in both] == [0, 0], both
    assert sorted("made by another run" in done.stderr for done in both) == [False, True]
    assert (repo / ".venv/bin/python").exists()
    command = repo / ".venv/bin/vllm"
    command.unlink()
    for layer in ("dev", "base"):  # dev holds base
        assert "is up to date" in setup(repo, layer).stderr
    assert os.access(command, os.X_OK) and str(repo) in command.read_text()  # tests/vllm/test_serve_command.py runs it
    (repo / "requirements/base.txt").write_text("# another pin\n", encoding="utf-8")
    assert "installing the base layer" in setup(repo, "base").stderr
    requirement = repo / "requirements/base.txt"
    requirement.write_text("./no-such-package\n", encoding="utf-8")
    failed = setup(repo)
    assert failed.returncode == 1
    assert "no-such-package" in failed.stderr and "run this again" in failed.stderr
    assert not list(repo.glob(".venv/.stamp-*"))
    if is_mended:
        requirement.write_text("", encoding="utf-8")
        assert setup(repo).returncode == 0


def test_an_interrupt_while_packages_are_fetched_says_that_and_nothing_else(repo: Path) -> None:
    """Ctrl-C reaches pip, too, and pip's end is no fault of the network."""
    (repo / "requirements/base.txt").write_text("no-such-package\n", encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as index:  # it accepts, and never answers
        index.settimeout(100)
        own = {"PYTHON": sys.executable, "VENV_DIR": str(repo / ".venv"), "PIP_CONFIG_FILE": os.devnull}
        own |= {"PIP_INDEX_URL": f"http://127.0.0.1:{index.getsockname()[1]}/simple", "no_proxy": "127.0.0.1"}
        with subprocess.Popen(
            [sys.executable, "-c", "import os, signal; signal.signal(2, signal.default_int_handler); "
             "os.execvp('bash', ['bash', 'tools/setup_env.sh'])"],
            cwd=repo, env={**os.environ, **own}, stderr=subprocess.PIPE, text=True, start_new_session=True,
        ) as script:  # fmt: skip
            asked, _ = index.accept()
            os.killpg(script.pid, signal.SIGINT)
            assert script.wait(60) == 130
            asked.close()
            assert script.stderr is not None
            text = script.stderr.read()
    assert "stopped: the same command starts the set-up again" in text and "error" not in text
    assert not list(repo.glob(".venv/.stamp-*"))


def test_an_environment_keeps_the_stack_that_it_was_asked_for(repo: Path) -> None:
    (repo / "requirements/base.txt").write_text("./not-of-this-stack\n", encoding="utf-8")
    made = setup(repo, "dev", STACK="cann82")
    if sys.version_info[:2] != (3, 11):
        assert made.returncode == 1 and "is not a Python 3.11 that runs" in made.stderr
        return
    assert made.returncode == 0 and "the dev layer of cann82" in made.stderr
    assert "is up to date" in setup(repo, STACK="cann82").stderr
    for other in ({}, {"STACK": "cann92"}):
        refused = setup(repo, **other)
        assert refused.returncode == 1 and "set STACK=cann82, or name another VENV_DIR" in refused.stderr
    (repo / "requirements/dev.txt").write_text("# another pin\n", encoding="utf-8")
    assert "installing the base layer of cann82" in setup(repo, STACK="cann82").stderr
    assert "expected cann92 or cann82" in setup(repo, STACK="cann81").stderr


@pytest.mark.slow
def test_a_machine_with_an_nvidia_driver_gets_torch_for_cuda_and_no_other(repo: Path) -> None:
    if list(Path("/dev").glob("davinci[0-9]*")):
        pytest.skip("this machine has NPUs")
    (repo / "bin").mkdir()
    (repo / "bin/nvidia-smi").write_text("#!/bin/sh\n", encoding="utf-8")
    (repo / "bin/nvidia-smi").chmod(0o755)
    path = f"{repo / 'bin'}:{os.environ['PATH']}"
    pin = repo / "requirements/cuda.txt"
    pin.write_text(f"{wheel_of_torch(repo / 'cpu', None)}\n", encoding="utf-8")
    without = setup(repo, PATH=path)
    assert without.returncode == 1 and "built without CUDA: put PIP_EXTRA_INDEX_URL=" in without.stderr
    pin.write_text(f"{wheel_of_torch(repo / 'cuda', '13.0')}\n", encoding="utf-8")
    made = setup(repo, PATH=path)
    assert made.returncode == 0 and "installing the base layer of cann92 with CUDA" in made.stderr, made.stderr
    assert "is up to date" in setup(repo, PATH=path).stderr
    if sys.version_info[:2] == (3, 11):
        other = setup(repo, PATH=path, STACK="cann82", VENV_DIR=str(repo / "older"))
        assert other.returncode == 0 and "is not used: STACK=cann82 is for NPUs" in other.stderr


def test_wrong_use_is_a_clear_error(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    unknown = setup(repo, "cuda")
    assert unknown.returncode == 1 and "expected base, dev, simulator or command" in unknown.stderr
    nothing = setup(repo, "command")
    assert nothing.returncode == 1 and "no environment in VENV_DIR" in nothing.stderr
    precious = tmp_path_factory.mktemp("home")
    (precious / "thesis.txt").write_text("years of work", encoding="utf-8")
    taken = setup(repo, VENV_DIR=str(precious))
    assert taken.returncode == 1 and "is not a virtual environment" in taken.stderr
    assert (precious / "thesis.txt").exists()
    no_python = setup(repo, PYTHON="/no/such/python")
    assert no_python.returncode == 1 and "PYTHON=/no/such/python" in no_python.stderr

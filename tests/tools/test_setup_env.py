"""The set-up script on a small repository of its own: made once, quick again, never half made."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import venv
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from recipes.common.short_folder import environment_problem

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


def wheel_of_torch(folder: Path, cuda: str | None, version: str = "2.13.0") -> Path:
    """A wheel whose torch knows nothing but the CUDA that it was built for."""
    folder.mkdir(parents=True, exist_ok=True)
    path, info = folder / f"torch-{version}-py3-none-any.whl", f"torch-{version}.dist-info"
    needs = "" if cuda is None else "Requires-Dist: nvidia-cudnn-cu13==9.20.0.48; python_version < '3'\n"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("torch/__init__.py", "")
        wheel.writestr("torch/version.py", f"cuda = {cuda!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n{needs}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def setup(repo: Path, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    own = ("VENV_DIR", "NPU_VENV_DIR", "PYTHON", "STACK")  # of who runs the tests: their environments are not these
    clean = {name: value for name, value in os.environ.items() if name not in own}
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


def test_a_folder_that_another_run_is_making_is_waited_for(repo: Path) -> None:
    """It has files and is no environment yet, as on a file system that all nodes share and set up at once."""
    folder = repo / ".venv"
    (folder / "include").mkdir(parents=True)
    handle = os.open(folder, os.O_RDONLY)
    with ThreadPoolExecutor(1) as pool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            waiting = pool.submit(setup, repo)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=3)
            (folder / "include").rmdir()
        finally:
            os.close(handle)
        assert waiting.result().returncode == 0, waiting.result().stderr


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


@pytest.fixture
def indexes(tmp_path: Path) -> Iterator[str]:
    """The address of package indexes; each is a folder in ``tmp_path / "served"``."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "served"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


FROM_CPU_INDEX, COSTS = "installing torch 2.13.0+cpu from http", "torch will be its build for CUDA"
# What pip's own index and the one for CPUs have; the version that is installed, its CUDA, what is printed.
# None: the index for CPUs accepts and never answers.
BUILDS: dict[str, tuple[dict[str, str | None], list[str] | None, str, str, str]] = {
    "beside PyPI's": ({"2.13.0": "13.0", "2.13.0+cpu": None}, None, "2.13.0+cpu", "", ""),
    "under the plain name": ({"2.13.0": None}, None, "2.13.0", "", ""),
    "beside a newer label": ({"2.13.0+cu130": "13.0", "2.13.0+cpu": None}, None, "2.13.0+cpu", "", ""),
    "of the index for CPUs": ({"2.13.0": "13.0"}, ["2.13.0+cpu"], "2.13.0+cpu", "", FROM_CPU_INDEX),
    "not in the index for CPUs": ({"2.13.0": "13.0"}, ["2.12.0+cpu"], "2.13.0", "13.0", COSTS),
    "behind a wall": ({"2.13.0": "13.0"}, None, "2.13.0", "13.0", COSTS),
    "another one is named": ({"2.13.0+cu130": "13.0"}, ["2.13.0+cpu"], "2.13.0+cu130", "13.0", COSTS),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", BUILDS)
def test_without_a_gpu_torch_is_its_cpu_build_where_one_can_be_had(repo: Path, indexes: str, case: str) -> None:
    if list(Path("/dev").glob("davinci[0-9]*")) or list(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has NPUs or GPUs")
    found, of_cpu, version, cuda, printed = BUILDS[case]
    (repo / "requirements/base.txt").write_text("torch==2.13.0\n", encoding="utf-8")
    for name, build in found.items():
        wheel_of_torch(repo / "served/pypi/torch", build, name)
    for name in of_cpu or ():
        wheel_of_torch(repo / "served/cpu/torch", None, name)
    with socket.create_server(("127.0.0.1", 0)) as wall:
        silent = f"http://127.0.0.1:{wall.getsockname()[1]}"
        own = {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_FIND_LINKS": "",
            "PIP_INDEX_URL": f"{indexes}/pypi",
            "no_proxy": "127.0.0.1",
        }
        own["TORCH_CPU_INDEX"] = silent if of_cpu is None else f"{indexes}/cpu"
        started = time.monotonic()
        made = setup(repo, **own)
        elapsed_s = time.monotonic() - started
    assert made.returncode == 0, made.stderr
    assert elapsed_s < 40  # pip alone would take minutes
    shown = 'import importlib.metadata as m, torch.version as v; print(m.version("torch"), v.cuda or "")'
    done = subprocess.run(
        [repo / ".venv/bin/python", "-c", shown], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == [version, cuda][: 1 + bool(cuda)]
    lines = [line for line in made.stderr.splitlines() if " torch " in line]
    assert len(lines) == bool(printed) and all(printed in line for line in lines), made.stderr
    assert "is up to date" in setup(repo, **own).stderr


@pytest.mark.slow
def test_npus_get_no_torch_that_ends_torch_npu(repo: Path) -> None:
    if list(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has GPUs")
    (repo / "requirements/base.txt").write_text("torch==2.13.0\n", encoding="utf-8")
    (repo / "bin").mkdir()
    (repo / "bin/npu-smi").write_text("#!/bin/sh\n", encoding="utf-8")
    (repo / "bin/npu-smi").chmod(0o755)
    own = {"PATH": f"{repo / 'bin'}:{os.environ['PATH']}", "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}
    own |= {"PIP_FIND_LINKS": str(repo / "wheels"), "TORCH_CPU_INDEX": "no"}
    wheel_of_torch(repo / "wheels", "13.0")
    refused = setup(repo, **own)
    assert refused.returncode == 1 and "torch_npu needs torch's CPU build" in refused.stderr
    assert "put PIP_EXTRA_INDEX_URL=" in refused.stderr
    assert not list(repo.glob(".venv/lib/*/site-packages/torch"))
    wheel_of_torch(repo / "wheels", None, "2.13.0+cpu")
    made = setup(repo, **own)
    assert made.returncode == 0 and "installing the base layer of cann92 and torch_npu" in made.stderr, made.stderr


def test_the_simulator_does_not_lie_over_a_torch_that_ends_torch_npu(repo: Path) -> None:
    """torch_npu beside that torch aborts the process, so it is not imported to see."""
    venv.create(repo / ".venv", symlinks=True)
    [site] = (repo / ".venv/lib").glob("python*/site-packages")
    (site / "torch").mkdir()
    for cuda, expected in (("13.0", "torch_npu needs torch's CPU build"), (None, "installing torch_npu over")):
        (site / "torch/__init__.py").write_text("raise AssertionError\n", encoding="utf-8")
        (site / "torch/version.py").write_text(f"cuda = {cuda!r}\n", encoding="utf-8")
        refused = setup(repo, "simulator")
        assert refused.returncode == 1 and expected in refused.stderr
        assert (repo / ".venv-npu").exists() == (cuda is None)


@pytest.mark.parametrize("character", [*" \t'\"\\:$`;&|<>()*?"])
def test_a_path_from_which_ray_cannot_start_is_refused_before_anything_is_made(repo: Path, character: str) -> None:
    folder = repo / f"a{character}b"
    for name in ("VENV_DIR", "NPU_VENV_DIR"):
        layer = "simulator" if name == "NPU_VENV_DIR" else "base"
        refused = setup(repo, layer, **{name: str(folder / "venv")})
        assert refused.returncode == 1 and f"set {name} to a folder without one" in refused.stderr
        assert not folder.exists()
    as_it_is = environment_problem(str(folder / "venv"))  # of SETUP=no; a colon hinders making one alone
    assert (as_it_is is None) == (character == ":")


@pytest.mark.slow
def test_a_clone_in_a_folder_with_a_space_asks_for_another_place_of_the_environment(repo: Path) -> None:
    clone = repo / "实验 b/clone"
    shutil.copytree(repo / "tools", clone / "tools")
    shutil.copytree(repo / "requirements", clone / "requirements")
    for own in ({}, {"VENV_DIR": "relative"}):
        refused = setup(clone, **own)
        assert refused.returncode == 1 and "set VENV_DIR to a folder without one" in refused.stderr
        assert not (clone / own.get("VENV_DIR", ".venv")).exists()
    made = setup(clone, VENV_DIR=str(repo / "实验"))
    assert made.returncode == 0, made.stderr
    command = (repo / "实验/bin/vllm").read_text(encoding="utf-8")
    script = f'exec() {{ echo "$PYTHONPATH|$1"; }}; {command.splitlines()[-1]}'
    own = {"PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, timeout=60, env=own)
    assert done.stdout == f"{clone}|{repo}/实验/bin/python\n"


def test_wrong_use_is_a_clear_error(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    unknown = setup(repo, "cuda")
    assert unknown.returncode == 1 and "expected base, dev, simulator, command or python" in unknown.stderr
    nothing = setup(repo, "command")
    assert nothing.returncode == 1 and "no environment in VENV_DIR" in nothing.stderr
    precious = tmp_path_factory.mktemp("home")
    (precious / "thesis.txt").write_text("years of work", encoding="utf-8")
    taken = setup(repo, VENV_DIR=str(precious))
    assert taken.returncode == 1 and "is not a virtual environment" in taken.stderr
    assert (precious / "thesis.txt").exists()
    no_python = setup(repo, PYTHON="/no/such/python")
    assert no_python.returncode == 1 and "PYTHON=/no/such/python" in no_python.stderr

"""Programs that use vLLM from outside, lm-evaluation-harness and TRL, in an environment of their own.

It is .venv-clients in the repository, lies over the one that runs the tests, and is made at first use, which needs a
package index.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.pages import ROOT

REQUIREMENTS = Path(__file__).with_name("clients_requirements.txt")
INSTALL_S, RUN_S = 600, 600


def clients_python() -> Path:
    """The environment's interpreter; skips the test, with the reason, where it cannot be made."""
    folder = ROOT / ".venv-clients"
    lower = sysconfig.get_path("purelib")
    stamp, wanted = folder / ".stamp", hashlib.sha256(REQUIREMENTS.read_bytes() + lower.encode()).hexdigest()
    python = folder / "bin" / "python"
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (stamp.is_file() and stamp.read_text() == wanted):
            stamp.unlink(missing_ok=True)
            venv.create(folder, clear=True, symlinks=True)
            site = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
            Path(site, "layer.pth").write_text(lower + "\n")
            if problem := _install(python):
                pytest.skip(f"lm-evaluation-harness and TRL cannot be installed into {folder}: {problem}")
            stamp.write_text(wanted)
    finally:
        os.close(lock)
    return python


def _install(python: Path) -> str | None:
    """Install what is pinned; return the end of pip's output when it fails."""
    options = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--no-deps", "--retries", "1"]
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", *options, "-r", str(REQUIREMENTS)]
    try:
        done = subprocess.run(pip, capture_output=True, text=True, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        return f"pip did not end within {INSTALL_S} s"
    return None if done.returncode == 0 else (done.stderr or done.stdout).strip().splitlines()[-1]


def run_client(arguments: Sequence[str], folder: Path) -> str:
    """Run the environment's Python with our `vllm` as docs/evaluating.md says, offline; return what it printed."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "third_party" / "clients")]),
        "HF_HOME": str(folder / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }
    command = [str(clients_python()), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, cwd=folder, env=environment)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return done.stdout

"""The script that looks for the Pythons of a machine."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("pythons.sh")


@pytest.mark.slow
def test_each_python_is_found_once_and_the_environments_own_is_left_out(tmp_path: Path) -> None:
    """One on PATH, the same one under another name, and pyenv's, whose version set-up does not take."""
    for name in ("bin/python3", "bin/python3.11", "pyenv/versions/3.9.1/bin/python3"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        is_old = "echo no >&2; exit 1" if "3.9.1" in name else f'exec "{sys.executable}" "$@"'
        (tmp_path / name).write_text(f"#!/bin/sh\n{is_old}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    own = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PYENV_ROOT": str(tmp_path / "pyenv")}

    def listed(venv_dir: str) -> list[str]:
        done = subprocess.run(
            ["bash", str(SCRIPT), "--list"],
            env=own | {"VENV_DIR": venv_dir},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        version = f"Python {platform.python_version()}: "
        return [line for line in done.stdout.splitlines() if line.startswith(version) and sys.base_prefix in line]

    assert len(listed("/no/such/environment")) == 1
    assert listed(sys.prefix) == []

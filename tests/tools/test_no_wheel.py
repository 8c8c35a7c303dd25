"""The repository is no package: each way to build or install it ends with the remedy."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAID = "Run bash tools/setup_env.sh"


def test_the_backend_that_pyproject_names_refuses_every_kind_of_package() -> None:
    named = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "project" not in named  # metadata of a package: tools such as uv build what has it
    system = named["build-system"]
    backend = importlib.import_module(f"{system['backend-path'][0]}.{system['build-backend']}")
    assert system["requires"] == []  # a refusal that first fetches packages comes late
    for kind in ("wheel", "sdist", "editable"):
        with pytest.raises(SystemExit, match=SAID):
            getattr(backend, f"build_{kind}")("folder", None)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["wheel --no-deps .", "install --dry-run .", "install --dry-run -e ."])
def test_pip_stops_with_the_remedy(tmp_path: Path, command: str) -> None:
    (tmp_path / "tools").mkdir()
    for name in ("pyproject.toml", "tools/no_wheel.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    pip = [sys.executable, "-m", "pip", *command.split()]
    done = subprocess.run(pip, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and SAID in done.stdout + done.stderr
    assert not list(tmp_path.glob("*.whl"))

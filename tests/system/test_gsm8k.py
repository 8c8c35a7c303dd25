"""The quick start's first command as it is: a tiny Qwen3 learns word problems on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT
from verl.utils.net_utils import free_ports


@pytest.mark.slow
def test_the_tiny_model_learns(tmp_path: Path) -> None:
    environment = {**os.environ, "SETUP": "no", "VENV_DIR": sys.prefix, "OUTPUT_DIR": str(tmp_path)}
    environment["RAY_PORT"] = str(free_ports(1)[0])
    subprocess.run(["bash", "recipes/gsm8k/run.sh"], cwd=ROOT, env=environment, check=True, timeout=900)
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    scores = [step["val/score"] for step in steps if "val/score" in step]
    assert scores[0] <= 0.5 and scores[-1] >= 0.8, scores
    assert all("val/greedy/score" in step for step in steps if "val/score" in step)

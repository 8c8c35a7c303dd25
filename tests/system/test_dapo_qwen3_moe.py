"""The first command of recipes/dapo_qwen3_moe, as it is: a tiny Qwen3-MoE learns."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from recipes.common.recipe import load_recipe
from tests.pages import ROOT
from tests.system.command import clean_environment, read_metrics


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_tiny_model_learns(tmp_path: Path) -> None:
    environment = clean_environment() | {"OUTPUT_DIR": str(tmp_path)}
    command = load_recipe("dapo_qwen3_moe").start_command.split()
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=1100)
    steps = read_metrics(tmp_path)
    scores = [step["val/score"] for step in steps if "val/score" in step]
    assert scores[0] <= 0 and scores[-1] >= 0.6, scores
    trained = steps[1:]
    assert all(step["train/num_gen_batches"] >= 1 for step in trained)
    assert any(step["train/dropped_surplus_groups"] > 0 for step in trained)
    assert all(step["training/rollout_probs_diff_max"] < 1e-3 for step in trained)

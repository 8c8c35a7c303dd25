"""The whole job of recipes/math_lighteval, small: data, torch-dist shards, two steps, and back to Hugging Face form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mindspeed_llm.hf_checkpoint import HFCheckpoint
from tests.pages import undocumented
from tests.system.command import read_metrics
from tests.system.in_process import run_stages_here
from tests.system.jobs import prepare_math_lighteval

STEPS = 2


@pytest.mark.slow  # test_r1_dynamic_sampling.py has a recipe's whole run, tests/recipes what is this one's own
def test_from_a_folder_of_problems_to_trained_weights(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_stages_here(prepare_math_lighteval(tmp_path), run, STEPS)
    steps = read_metrics(run)
    assert undocumented(name for step in steps for name in step) == []
    assert [step["step"] for step in steps] == [*range(STEPS + 1)]
    assert (run / "dist_ckpt" / ".metadata").is_file(), "training started from torch-dist shards"
    assert (run / "report.html").is_file()
    trained = run / "trained_hf" / f"global_step_{STEPS}"
    assert json.loads((trained / "config.json").read_text())["model_type"] == "deepseek_v3"
    before, after = HFCheckpoint(run / "base_model_bf16"), HFCheckpoint(trained)
    gate, down = "model.layers.1.mlp.gate.weight", "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    assert torch.equal(before.read(gate).float(), after.read(gate).float()), "the router is frozen"
    assert not torch.equal(before.read(down).float(), after.read(down).float())

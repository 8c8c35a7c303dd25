"""The whole job of recipes/math_lighteval, small: data, torch-dist shards, two steps, and back to Hugging Face form."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from mindspeed_llm.weights import HFCheckpoint
from recipes.common.base_model import make_base_model
from recipes.math_lighteval.arithmetic import write_set
from recipes.math_lighteval.math_lighteval import convert
from recipes.math_lighteval.recipe import CORPUS
from tests.pages import undocumented
from tests.system.command import Command, read_metrics
from tests.system.jobs import SMALL

STEPS = 2


def test_from_a_folder_of_problems_to_trained_weights(tmp_path: Path) -> None:
    write_set(tmp_path / "problems", 240, seed=3)
    assert convert(tmp_path / "problems", tmp_path / "data") == {"train": 216, "test": 24}
    model = tmp_path / "model"
    make_base_model(
        CORPUS, tmp_path / "data" / "train.parquet", model, seed=3, num_steps=12, batch_size=32, num_processes=1
    )
    run = tmp_path / "run"
    environment = {"INPUT_DIR": tmp_path / "problems", "MODEL_PATH": model, "OUTPUT_DIR": run, "STEPS": STEPS}
    with Command(tmp_path / "run.log", environment, SMALL, recipe="math_lighteval") as command:
        assert command.wait() == 0, command.tail()
        assert command.left_behind() == []
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

"""MODEL_PATH with config and tokenizer only: enough for random weights and beside finished shards, else refused."""

from __future__ import annotations

import json
import shutil
from importlib import import_module
from pathlib import Path

import pytest

from hf_formats.config import load_hf_config
from hf_formats.fp8 import QUANTIZATION_CONFIG
from recipes.common.recipe import load_recipe
from recipes.common.tiny_models import DEEPSEEK_V3
from recipes.common.tokenizer import write_tokenizer
from tools.launch.checks import model_problems, weight_problems
from tools.launch.job import Job, resolve_config
from tools.launch.settings import read_settings
from tools.launch.stages import Stage, stages
from verl.utils.tokenizer import hf_tokenizer

RECIPE = load_recipe("r1_zero")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What of a published FP8 checkpoint is downloaded in a second: its config, quantised with MTP, and tokenizer."""
    directory = tmp_path_factory.mktemp("published")
    dimensions = DEEPSEEK_V3.config
    dimensions |= {"quantization_config": QUANTIZATION_CONFIG, "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(dimensions))
    write_tokenizer([f"What is {i} + {i}?" for i in range(50)], directory, 400, 64)
    return directory


def _job(tmp_path: Path, model: Path, config: str, *overrides: str, **variables: Path) -> Job:
    given = {"CONFIG_NAME": config, "OUTPUT_DIR": str(tmp_path / "out"), "MODEL_PATH": str(model)}
    settings = read_settings(RECIPE, list(overrides), given | {name: str(path) for name, path in variables.items()})
    return Job(settings, resolve_config(settings))


def _bf16_stage(job: Job) -> Stage:
    return next(stage for stage in stages(job) if stage.name == "fp8_to_bf16")


def test_random_weights_need_no_weights(tmp_path: Path, published: Path) -> None:
    job = _job(tmp_path, published, "cann_random_init_tiny")
    assert model_problems(published) == [] and weight_problems(job, published) == []
    made = tmp_path / "out" / "base_model_config"
    assert job.config.actor_rollout_ref.model.path == str(made)
    for _ in range(2):  # the second finds the first's
        _python, _module_option, module, *arguments = _bf16_stage(job).command
        assert import_module(module).main(arguments) == 0
    hf = load_hf_config(str(made))
    assert (hf.quant_method, hf.num_nextn_predict_layers, hf.torch_dtype) == (None, 0, "bfloat16")
    assert hf_tokenizer(str(made)).encode("What is 3 + 4?") == hf_tokenizer(str(published)).encode("What is 3 + 4?")
    assert not list(made.glob("*.safetensors"))


def test_finished_shards_need_no_weights_and_missing_ones_do(tmp_path: Path, published: Path) -> None:
    shards = tmp_path / "shards"
    (shards / "iter_0000001" / "mp_rank_00").mkdir(parents=True)
    job = _job(tmp_path, published, "r1_zero_tiny", DIST_CKPT_PATH=shards)
    assert weight_problems(job, published) == [] and "plain_config" in _bf16_stage(job).shown()
    job = _job(tmp_path, published, "r1_zero_tiny")
    assert "fp8_cast_bf16" in _bf16_stage(job).shown()
    assert "holds neither model.safetensors.index.json" in weight_problems(job, published)[0]


def test_a_plain_directory_is_used_where_it_is(tmp_path: Path, published: Path) -> None:
    plain = shutil.copytree(published, tmp_path / "plain")
    dimensions = json.loads((plain / "config.json").read_text())
    del dimensions["quantization_config"]
    (plain / "config.json").write_text(json.dumps(dimensions))
    job = _job(tmp_path, plain, "cann_random_init_tiny")
    assert weight_problems(job, plain) == [] and job.config.actor_rollout_ref.model.path == str(plain)
    assert "is not quantised" in str(_bf16_stage(job).skip_reason)


def test_missing_files_and_an_unknown_family_are_told_together(tmp_path: Path) -> None:
    assert model_problems(tmp_path) == [
        f"MODEL_PATH {tmp_path} has no config.json and no tokenizer.json and no tokenizer_config.json; expected a "
        "Hugging Face model directory"
    ]
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    missing, family = model_problems(tmp_path)
    assert "has no tokenizer.json and no tokenizer_config.json" in missing and "mamba" in family

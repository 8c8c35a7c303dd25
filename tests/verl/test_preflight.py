"""What is missing on the disks is one screen of sentences and a non-zero exit, before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipes.common.tokenizer import write_tokenizer
from tests.hf_formats.own_code import write_own_code_tokenizer
from tests.mindspeed_llm.tiny import tiny_hf_config, tiny_qwen3_config, write_tiny_checkpoint
from verl.trainer.config import PPOTrainerConfig, load_config, validate_config
from verl.trainer.config.override_text import quoted
from verl.trainer.main_ppo import EXIT_BAD_INPUT, main
from verl.trainer.preflight import preflight_problems, writable_problem

FUNCTION = str(Path(__file__).with_name("rewards_for_tests.py"))


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    """Overrides of a run that lacks nothing: a model directory, a parquet file, a reward function, a place to write."""
    model = tmp_path / "model"
    write_tiny_checkpoint(model, tiny_hf_config(num_hidden_layers=2))
    write_tokenizer(["a tiny tokenizer"], model, 300, 512)
    row = {"data_source": "s", "prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": "1"}}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "data.parquet")
    return {
        "actor_rollout_ref.model.path": str(model),
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
        "data.train_files": str(tmp_path / "data.parquet"),
        "data.val_files": str(tmp_path / "data.parquet"),
        "custom_reward_function.path": quoted(FUNCTION),
        "trainer.default_local_dir": str(tmp_path / "checkpoints"),
        "trainer.report_dir": str(tmp_path / "report"),
        "trainer.n_gpus_per_node": 1,
    }


def _config(keys: dict[str, Any]) -> PPOTrainerConfig:
    return load_config([f"{key}={value}" for key, value in keys.items()])


def test_a_complete_run_has_no_problems(keys: dict[str, Any]) -> None:
    assert preflight_problems(_config(keys)) == []


@pytest.mark.skipif(find_spec("deep_ep") is not None, reason="DeepEP is installed here")
def test_a_dispatcher_without_its_package_is_named(keys: dict[str, Any]) -> None:
    engine = "actor_rollout_ref.actor.megatron"
    keys |= {"trainer.device": "cuda", f"{engine}.dtype": "bfloat16"}
    keys[f"+{engine}.override_transformer_config.moe_token_dispatcher_type"] = "flex"
    (problem,) = preflight_problems(_config(keys))
    assert "moe_token_dispatcher_type is flex, but deep_ep is not installed here: build DeepEP 1" in problem


def test_a_dense_model_that_both_engines_know_has_no_problems(keys: dict[str, Any]) -> None:
    model = Path(keys["actor_rollout_ref.model.path"])
    for file in model.glob("model*"):
        file.unlink()
    write_tiny_checkpoint(model, tiny_qwen3_config())
    assert preflight_problems(_config(keys)) == []


def test_a_tokenizer_that_cannot_be_loaded_is_named(keys: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    model = Path(keys["actor_rollout_ref.model.path"])
    (model / "tokenizer.json").unlink()
    code = write_own_code_tokenizer(model)
    [problem] = preflight_problems(_config(keys))
    assert problem.startswith(f"actor_rollout_ref.model.path: {model} has no tokenizer.json, and its tokenizer (")
    assert main([*(f"{key}={value}" for key, value in keys.items()), "--check", "all"]) == EXIT_BAD_INPUT
    assert "put the same tokenizer there in the fast form" in capsys.readouterr().err
    assert not code.was_executed()
    write_tokenizer(["the fast form"], model, 300, 512)
    assert preflight_problems(_config(keys)) == []
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": None}))
    [problem] = preflight_problems(_config(keys))
    assert "has no end-of-sequence token; set eos_token in tokenizer_config.json" in problem
    (model / "tokenizer.json").write_text("{}")
    [problem] = preflight_problems(_config(keys))
    assert f"the tokenizer in {model} cannot be loaded" in problem


def test_prompts_that_the_chat_template_does_not_take_are_named_by_their_row(keys: dict[str, Any]) -> None:
    parts = [[{"type": "text", "text": "q"}], [{"type": "image", "text": None}]]
    rows = [
        {"data_source": "s", "prompt": [{"role": "user", "content": part}], "reward_model": {"ground_truth": "1"}}
        for part in parts
    ]
    file = Path(keys["data.train_files"]).with_name("parts.parquet")
    pq.write_table(pa.Table.from_pylist(rows), file)
    [problem] = preflight_problems(_config(keys | {"data.train_files": str(file)}))
    assert problem.startswith(f"data.train_files: row 1 of {file}: the content of a message has a part of type 'image'")
    settings = Path(keys["actor_rollout_ref.model.path"]) / "tokenizer_config.json"
    content = json.loads(settings.read_text(encoding="utf-8"))
    del content["chat_template"]
    settings.write_text(json.dumps(content), encoding="utf-8")
    [problem] = preflight_problems(_config(keys))
    assert problem.startswith("actor_rollout_ref.model.path: the tokenizer has no chat template")
    template = "data.apply_chat_template_kwargs.chat_template"
    assert preflight_problems(_config(keys | {f"+{template}": quoted("{{ messages[0].content }}")})) == []


def test_a_truncated_and_a_missing_shard_are_named(keys: dict[str, Any]) -> None:
    model = Path(keys["actor_rollout_ref.model.path"])
    first, second = sorted(model.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-100])
    second.unlink()
    [problem] = preflight_problems(_config(keys))
    assert f"{first.name} is truncated" in problem
    assert f"{second.name} is missing" in problem


def test_weights_of_another_model_and_another_kind_of_model_are_named(keys: dict[str, Any]) -> None:
    config_file = Path(keys["actor_rollout_ref.model.path"]) / "config.json"
    config_file.write_text(json.dumps(tiny_hf_config(num_hidden_layers=2, intermediate_size=256)))
    [problem] = preflight_problems(_config(keys))
    assert "mlp.up_proj.weight has shape (128, 64); config.json makes it (256, 64)" in problem
    config_file.write_text(json.dumps({"model_type": "mamba"}))
    [problem] = preflight_problems(_config(keys))
    assert "model_type 'mamba' is not supported; supported: deepseek_v3, deepseek_v2, qwen3" in problem


def test_weights_that_are_not_loaded_need_not_be_there(keys: dict[str, Any]) -> None:
    for shard in Path(keys["actor_rollout_ref.model.path"]).glob("*.safetensors*"):
        shard.unlink()
    assert preflight_problems(_config(keys))
    keys["actor_rollout_ref.actor.megatron.load_weight"] = False
    assert preflight_problems(_config(keys)) == []


def test_a_sharded_checkpoint_that_is_not_there_is_named(keys: dict[str, Any], tmp_path: Path) -> None:
    keys["actor_rollout_ref.actor.megatron.use_dist_checkpointing"] = True
    keys["actor_rollout_ref.actor.megatron.dist_checkpointing_path"] = tmp_path / "shards"
    [problem] = preflight_problems(_config(keys))
    assert problem.startswith("actor_rollout_ref.actor.megatron.dist_checkpointing_path: ")
    assert str(tmp_path / "shards") in problem
    keys["actor_rollout_ref.actor.megatron.dist_checkpointing_path"] = ""
    assert "dist_checkpointing_path is empty; give the folder of the shards" in preflight_problems(_config(keys))[0]


def test_everything_that_is_missing_is_listed_together(keys: dict[str, Any], tmp_path: Path) -> None:
    broken = tmp_path / "reward.py"
    broken.write_text("raise NameError('oops')\n")
    (tmp_path / "file").write_text("")
    keys |= {
        "actor_rollout_ref.model.path": tmp_path / "nowhere",
        "data.val_files": tmp_path / "absent.parquet",
        "custom_reward_function.path": broken,
        "trainer.report_dir": tmp_path / "file" / "below",
        "reward_model.reward_manager": "absent",
    }
    pq.write_table(pa.table({"data_source": [1]}), tmp_path / "data.parquet")
    text = "\n".join(preflight_problems(_config(keys)))
    assert "has no config.json" in text
    assert "data.val_files" in text and "absent.parquet does not exist" in text
    assert f"data.train_files: {tmp_path / 'data.parquet'}: column 'data_source' is int64; expected a string" in text
    assert "no column 'prompt' (a list of {role, content})" in text
    assert f"custom_reward_function: {broken} cannot be imported: NameError: oops" in text
    broken.write_text("raise SystemExit('usage: reward.py DATA')\n")
    text = "\n".join(preflight_problems(_config(keys)))
    assert f"custom_reward_function: {broken} cannot be imported: SystemExit: usage: reward.py DATA" in text
    assert "reward_manager is 'absent'; expected one of batch, dapo, gdpo, naive, prime" in "\n".join(
        validate_config(_config(keys))
    )
    assert "trainer.report_dir" in text and "is a file" in text
    assert not (tmp_path / "checkpoints").exists(), "looking leaves no traces"


def test_a_reward_function_that_the_file_does_not_define(keys: dict[str, Any]) -> None:
    keys["custom_reward_function.name"] = "absent"
    assert "defines no 'absent'; it defines" in preflight_problems(_config(keys))[0]


def test_a_reward_file_may_define_dataclasses_and_must_name_a_function(keys: dict[str, Any], tmp_path: Path) -> None:
    lines = [
        "from __future__ import annotations",
        "from dataclasses import dataclass",
        "@dataclass",
        "class Parts:",
        "    accuracy: float",
        "LIMIT = 3",
        "def compute_score(*args): return Parts(1.0).accuracy",
    ]
    (tmp_path / "reward.py").write_text("\n".join(lines))
    keys["custom_reward_function.path"] = tmp_path / "reward.py"
    assert preflight_problems(_config(keys)) == []
    keys["custom_reward_function.name"] = "LIMIT"
    assert "LIMIT of" in preflight_problems(_config(keys))[0]


def test_a_reward_function_that_cannot_be_called_and_a_source_without_one(keys: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def compute_score(solution_str, ground_truth): return 1.0\n")
    keys["custom_reward_function.path"] = tmp_path / "reward.py"
    [problem] = preflight_problems(_config(keys))
    assert "compute_score of" in problem and "cannot be called; expected def NAME(data_source, solution_str" in problem
    keys |= {"custom_reward_function.path": quoted(FUNCTION), "reward_model.reward_manager": "batch"}
    assert "takes one sample; its first parameter must be data_sources" in preflight_problems(_config(keys))[0]
    del keys["custom_reward_function.path"], keys["reward_model.reward_manager"]
    [problem] = preflight_problems(_config(keys))
    assert problem.startswith("no reward function for the data source s: custom_reward_function.path is empty")


def test_functions_by_data_source_are_checked_against_the_data(keys: dict[str, Any]) -> None:
    del keys["custom_reward_function.path"]
    section = "custom_reward_function.by_data_source"
    assert preflight_problems(_config(keys | {f"{section}.s.path": quoted(FUNCTION)})) == []
    config = _config(keys | {f"{section}.s.path": quoted(FUNCTION), f"{section}.t.path": quoted(f"{FUNCTION}.not")})
    problems = "\n".join(preflight_problems(config))
    assert f"{section}.t: {FUNCTION}.not does not exist" in problems
    assert f"{section}.t matches no data source; the data has s" in problems


def test_a_directory_of_the_kernel_is_not_writable() -> None:
    assert writable_problem(Path("/proc/run")) is not None


def test_bad_input_ends_the_command_with_one_screen(keys: dict[str, Any], capsys: pytest.CaptureFixture) -> None:
    assert main([*(f"{key}={value}" for key, value in keys.items()), "-cn", "base", "--check", "all"]) == 0
    assert main(["trainer.n_gpu_per_node=3"]) == EXIT_BAD_INPUT
    shown = capsys.readouterr().err
    assert "nearest known key is trainer.n_gpus_per_node" in shown
    assert "Traceback" not in shown
    assert main([f"actor_rollout_ref.model.path={keys['data.train_files']}.not"]) == EXIT_BAD_INPUT


def test_help_does_not_load_torch() -> None:
    code = "import sys, verl.trainer.main_ppo as m; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.strip() == "False"

"""Command lines of upstream with other paths and sizes, and nothing else changed, train a tiny DeepSeek-V3."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from recipes.common.recipe import load_recipe
from tests.system.command import read_metrics
from tests.system.in_process import FEW_CPUS, fit
from tests.system.jobs import Prepared
from tests.verl.test_upstream_scripts import script_arguments
from verl.trainer.command_line import read_command_line
from verl.trainer.config import compose_config, resolve_config, validate_config
from verl.trainer.config.override_text import override

pytestmark = pytest.mark.timeout(600)
MODELS = "actor_rollout_ref"
ENGINES = (f"{MODELS}.actor.megatron", f"{MODELS}.ref.megatron")
SIZES = (
    "data.train_batch_size=8",
    "data.max_prompt_length=512",
    "data.max_response_length=32",
    f"{MODELS}.actor.ppo_mini_batch_size=8",
    f"{MODELS}.actor.ppo_micro_batch_size_per_gpu=2",
    *(f"{MODELS}.{role}.log_prob_micro_batch_size_per_gpu=2" for role in ("ref", "rollout")),
    f"{MODELS}.rollout.n=4",
    f"{MODELS}.rollout.tensor_model_parallel_size=1",
    f"{MODELS}.rollout.max_num_seqs=32",
    f"{MODELS}.rollout.max_num_batched_tokens=2048",
    f"{MODELS}.rollout.num_gpu_blocks_override=512",
    f"{MODELS}.rollout.dtype=float32",
    *(
        f"{engine}.{key}={size}"
        for engine in ENGINES
        for key, size in (
            ("dtype", "float32"),
            ("tensor_model_parallel_size", 1),
            ("pipeline_model_parallel_size", 1),
            ("expert_model_parallel_size", 2),
            ("use_dist_checkpointing", False),
        )
    ),
    *(
        f"{ENGINES[0]}.override_transformer_config.{key}=null"
        for key in (
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
            "pipeline_num_transformer_layers",
        )
    ),
    "trainer.nnodes=1",
    "trainer.n_gpus_per_node=2",
    "trainer.device=cpu",
    "trainer.total_training_steps=2",
    "trainer.logger=console",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    FEW_CPUS,
)
# What the smaller sizes need besides.
OVERLONG = ("reward_model.reward_kwargs.overlong_buffer_cfg.len=8", "reward_model.reward_kwargs.max_resp_len=32")
SEPARATE = (
    "trainer.n_gpus_per_node=1",
    "rollout.nnodes=1",
    "rollout.n_gpus_per_node=1",
    *(f"{engine}.expert_model_parallel_size=1" for engine in ENGINES),
)
SCRIPTS = {
    "grpo_moonlight_16b": (),
    "seed_r1_ascend": tuple(  # the tiny model has other positions
        f"~{ENGINES[0]}.override_transformer_config.{key}"
        for key in ("rope_scaling_type", "yarn_scaling_factor", "rope_scaling_mscale", "rope_scaling_mscale_all_dim")
    ),
    "dapo_deepseek_671b_12_nodes": OVERLONG,
    "one_step_off_qwen2_5_7b": (*OVERLONG, *SEPARATE, f"~{MODELS}.model.override_config"),
    "fully_async_qwen3_30b_96_32": (
        *OVERLONG,
        *SEPARATE,
        "data.train_batch_size=0",
        "rollout.total_rollout_steps=16",
        "rollout.test_freq=-1",
        "async_training.trigger_parameter_sync_step=1",
    ),
}


@pytest.mark.slow  # test_upstream_scripts.py has what they resolve to, test_killed_whole.py runs of the recipes
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_command_line_of_upstream_trains(local_ray: None, converted: Prepared, tmp_path: Path, name: str) -> None:
    data = converted.folder / "data"
    paths = (
        override("data.train_files", data / "train.parquet"),
        override("data.val_files", data / "test.parquet"),
        f"{MODELS}.model.path={converted.model_path}",
        override("custom_reward_function.path", load_recipe("r1_zero").reward_path),
        override("trainer.default_local_dir", tmp_path / "checkpoints"),
        override("hydra.run.dir", tmp_path),
    )
    args = read_command_line([*script_arguments(name), *paths, *SIZES, *SCRIPTS[name]])
    config, taken = resolve_config(compose_config(args.overrides, config_name=args.config_name))
    assert validate_config(config) == [] and taken
    fit(config)
    rows = [row for row in read_metrics(tmp_path) if row["step"]]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["actor/grad_norm"] > 0 and math.isfinite(row["actor/pg_loss"]) for row in rows)
    is_on_policy = config.trainer.schedule == "sync"
    assert all(row["training/rollout_probs_diff_max"] < 1e-3 for row in rows[: 2 if is_on_policy else 1])
